"""FineWeb-Edu as parquet from the Hugging Face hub.

The sources are its samples, `fineweb-edu-10b`, `-100b` and `-350b`, and the crawls that they were
drawn from, `fineweb-edu-crawl` with ``data.subset``.

Files lie in ``<data folder>/fineweb-edu/sample/<sample>/`` or ``.../data/<crawl>/``, as in the
repository. If the user puts files there, nothing is downloaded. ``listing.json`` beside them pins
the revision that was first seen until it is removed.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from kvlab.data import text_formats
from kvlab.data.data_dir import ProgressCallback, get_data_dir
from kvlab.data.sources import TextSource, TextUnit
from kvlab.errors import DataError
from kvlab.extensions.fineweb_edu.config import FineWebEduFields
from kvlab.fs.atomic_files import read_json, write_json
from kvlab.humanize import format_bytes, summarize_error
from kvlab.spec import DataConfig

REPOSITORY = "HuggingFaceFW/fineweb-edu"
_TIMEOUT_SECONDS = 5.0


@final
class FineWebEdu(TextSource):
    """One part of FineWeb-Edu.

    Args:
        sample: 10BT, 100BT or 350BT; None for the crawl that ``data.subset`` names.
    """

    licence = "ODC-By 1.0 (FineWeb-Edu); Common Crawl's terms of use apply"

    def __init__(self, sample: str | None):
        self._sample = sample
        # samples were drawn at random from all crawls; the files of a crawl may be sorted
        self.is_shuffled = sample is not None

    def identity(self, data: DataConfig) -> Any:
        """Return the revision, and the name and size of every file."""
        return {"sample": self._sample or FineWebEduFields.of(data).subset, **self._listing(data)}

    def text_bytes(self, data: DataConfig) -> int:
        files = self._listing(data)["files"]
        return sum(text_formats.estimate_text_bytes(name, size) for name, size in files)

    def units(self, data: DataConfig, progress: ProgressCallback) -> Iterator[TextUnit]:
        folder, listing = self._folder(data), self._listing(data)
        for name, size in listing["files"]:
            path = folder / name
            if not path.exists():
                progress(f"downloading {name} ({format_bytes(size)})")
                _download_file(f"{self._subfolder(data)}/{name}", listing["revision"])
            if path.stat().st_size != size:
                text = f"{path} has {path.stat().st_size} bytes, not {size}"
                raise DataError(f"{text}; remove it to download it again")
            file = f"{folder.name} {listing['revision']} {name} {size}"
            for start, stop in text_formats.split_file(path):
                yield {
                    "key": f"{REPOSITORY} {file} {start} {stop}",
                    "path": str(path),
                    "part": [start, stop],
                }

    def read(self, unit: TextUnit) -> Iterator[tuple[str, str | None]]:
        for text in text_formats.read_documents(Path(unit["path"]), unit["part"]):
            yield text, None

    def _subfolder(self, data: DataConfig) -> str:
        """Return the folder of the files in the repository."""
        crawl = FineWebEduFields.of(data).subset
        return f"data/{crawl}" if self._sample is None else f"sample/{self._sample}"

    def _folder(self, data: DataConfig) -> Path:
        return get_data_dir() / "fineweb-edu" / self._subfolder(data)

    def _listing(self, data: DataConfig) -> dict[str, Any]:
        """``{"revision": str or None, "files": [[name, bytes], ...]}``, sorted by name."""
        folder = self._folder(data)
        listing: dict[str, Any]
        with suppress(FileNotFoundError):
            listing = read_json(folder / "listing.json")
            return listing
        if local := sorted(folder.glob("*.parquet")):
            return {"revision": None, "files": [[one.name, one.stat().st_size] for one in local]}
        listing = _list_remote_files(self._subfolder(data), folder)
        write_json(folder / "listing.json", listing)
        return listing


def _list_remote_files(subfolder: str, folder: Path) -> dict[str, Any]:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    try:
        # A short request first: the library retries the following ones many times.
        revision = api.dataset_info(REPOSITORY, timeout=_TIMEOUT_SECONDS).sha
        tree = api.list_repo_tree(REPOSITORY, subfolder, repo_type="dataset", revision=revision)
        files = [(Path(file.path).name, file.size) for file in tree
                 if isinstance(file, RepoFile) and file.path.endswith(".parquet")]  # fmt: skip
    except Exception as error:  # the library raises many kinds, its transport's too
        text = f"{REPOSITORY} cannot be reached ({summarize_error(error)})"
        hint = f"connect, or put its {subfolder}/*.parquet into {folder}"
        raise DataError(f"{text}; {hint}") from None
    if not files:
        raise DataError(f"{REPOSITORY} has no parquet files in {subfolder} at {revision}")
    return {"revision": revision, "files": [list(file) for file in sorted(files)]}


def _download_file(name: str, revision: str | None) -> None:
    from huggingface_hub import hf_hub_download

    folder = get_data_dir() / "fineweb-edu"
    try:
        hf_hub_download(
            REPOSITORY, name, repo_type="dataset", revision=revision, local_dir=str(folder)
        )
    except Exception as error:  # as above
        text = f"{REPOSITORY}, {name} could not be downloaded ({summarize_error(error)})"
        raise DataError(f"{text}; run again to continue") from None
