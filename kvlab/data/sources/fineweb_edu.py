"""FineWeb-Edu, as parquet from the hub: its samples `fineweb-edu-10b`, `-100b` and `-350b`, and
any one of the crawls that they were drawn from, `fineweb-edu-crawl` with ``data.subset``.

The files lie in ``<data folder>/fineweb-edu/sample/<sample>/`` or ``.../data/<crawl>/``, as in the
repository. Files that you put there yourself serve as well, and then nothing is downloaded.
``listing.json`` beside them holds the revision that was first seen: it stays until you remove it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from kvlab.data import text_formats
from kvlab.data.data_dir import ProgressCallback, get_data_dir
from kvlab.data.text_formats import read_documents, split_file
from kvlab.data.text_source import TextSource, TextUnit
from kvlab.errors import DataError
from kvlab.fs.atomic_files import read_json, write_json
from kvlab.spec import DataConfig

REPOSITORY = "HuggingFaceFW/fineweb-edu"
_TIMEOUT_SECONDS = 5.0


@final
class FineWebEdu(TextSource):
    """One part of FineWeb-Edu.

    Args:
        sample: 10BT, 100BT or 350BT; None: the crawl that ``data.subset`` names.
    """

    licence = "ODC-By 1.0 (FineWeb-Edu); Common Crawl's terms of use apply"

    def __init__(self, sample: str | None):
        self._sample = sample
        # samples were drawn at random from all crawls; a crawl's files are not said to be
        self.shuffled = sample is not None

    def identity(self, data: DataConfig) -> Any:
        """The revision and the name and size of every file."""
        return {"sample": self._name(data), **self._listing(self._place(data))}

    def size(self, data: DataConfig) -> int:
        return sum(size for _, size in self._listing(self._place(data))["files"])

    def text_bytes(self, data: DataConfig) -> int:
        files = self._listing(self._place(data))["files"]
        return sum(text_formats.estimate_text_bytes(name, size) for name, size in files)

    def missing_bytes(self, data: DataConfig, text_bytes: int) -> int:
        place, missing, held = self._place(data), 0, 0
        for name, size in self._listing(place)["files"]:
            if held >= text_bytes:
                break
            held += text_formats.estimate_text_bytes(name, size)
            missing += 0 if (_local_dir(place) / name).exists() else size
        return missing

    def units(self, data: DataConfig, progress: ProgressCallback) -> Iterator[TextUnit]:
        place = self._place(data)
        listing = self._listing(place)
        for name, size in listing["files"]:
            path = _local_dir(place) / name
            if not path.exists():
                progress(f"downloading {name} ({size / 10**6:,.0f} MB)")
                _download_file(place, name, listing["revision"])
            if path.stat().st_size != size:
                text = f"{path} has {path.stat().st_size} bytes, not {size}"
                raise DataError(f"{text}; remove it to download it again")
            parts = split_file(path)
            each = size // max(1, len(parts))
            for start, stop in parts:
                key = f"{REPOSITORY} {self._name(data)} {listing['revision']} {name} {size}"
                part = {"part": [start, stop], "bytes": each}
                yield {"key": f"{key} {start} {stop}", "path": str(path), **part}

    def read(self, unit: TextUnit) -> Iterator[str]:
        start, stop = unit["part"]
        yield from read_documents(Path(unit["path"]), (start, stop))

    def _name(self, data: DataConfig) -> str:
        name = self._sample or data.subset
        assert name is not None, "data.subset is checked with the other fields"
        return name

    def _place(self, data: DataConfig) -> str:
        """Where the files lie in the repository."""
        return f"{'sample' if self._sample else 'data'}/{self._name(data)}"

    def _listing(self, place: str) -> dict[str, Any]:
        """``{"revision": str or None, "files": [[name, bytes], ...]}``, sorted by name."""
        folder = _local_dir(place)
        try:
            listing: dict[str, Any] = read_json(folder / "listing.json")
            return listing
        except FileNotFoundError:
            pass
        local = sorted(folder.glob("*.parquet"))
        if local:
            files = [[file.name, file.stat().st_size] for file in local]
            return {"revision": None, "files": files}
        listing = _list_remote_files(place)
        write_json(folder / "listing.json", listing)
        return listing


def _local_dir(place: str) -> Path:
    return get_data_dir() / "fineweb-edu" / place


def _list_remote_files(place: str) -> dict[str, Any]:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    try:
        # One short question first: the library asks the next ones many times over.
        revision = api.dataset_info(REPOSITORY, timeout=_TIMEOUT_SECONDS).sha
        tree = api.list_repo_tree(REPOSITORY, place, repo_type="dataset", revision=revision)
        found = [(Path(file.path).name, file.size) for file in tree
                 if isinstance(file, RepoFile) and file.path.endswith(".parquet")]  # fmt: skip
    except Exception as error:  # the library lets many kinds through, its transport's too
        text = f"{REPOSITORY} cannot be reached ({_first_line(error)})"
        way_out = f"connect, or put its {place}/*.parquet into {_local_dir(place)}"
        raise DataError(f"{text}; {way_out}") from None
    if not found:
        raise DataError(f"{REPOSITORY} has no parquet files in {place} at {revision}")
    return {"revision": revision, "files": [list(file) for file in sorted(found)]}


def _download_file(place: str, name: str, revision: str | None) -> None:
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(
            REPOSITORY,
            f"{place}/{name}",
            repo_type="dataset",
            revision=revision,
            local_dir=os.fspath(get_data_dir() / "fineweb-edu"),
        )
    except Exception as error:  # as above
        text = f"{REPOSITORY}, {name} could not be downloaded ({_first_line(error)})"
        raise DataError(f"{text}; run again, what is there is kept") from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
