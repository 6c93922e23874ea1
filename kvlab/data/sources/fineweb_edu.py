"""`fineweb-edu-10b`, `fineweb-edu-100b`: samples of FineWeb-Edu, as parquet from the hub.

The files lie in ``<data folder>/fineweb-edu/sample/<sample>/``, as in the repository. Files that
you put there yourself serve as well, and then nothing is downloaded. ``listing.json`` beside them
holds the revision that was first seen: it stays until you remove it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from kvlab.data.folder import Progress, data_folder
from kvlab.data.formats import divide, read_documents
from kvlab.data.source import Source, Unit
from kvlab.errors import DataError
from kvlab.files import read_json, write_json
from kvlab.spec import DataConfig

REPOSITORY = "HuggingFaceFW/fineweb-edu"
_PATIENCE_SECONDS = 5.0


@final
class FineWebEdu(Source):
    """One sample of FineWeb-Edu; ``sample`` is 10BT or 100BT."""

    licence = "ODC-By 1.0 (FineWeb-Edu); Common Crawl's terms of use apply"
    shuffled = True  # the samples were drawn at random from all crawls

    def __init__(self, sample: str):
        self._sample = sample

    def identity(self, data: DataConfig) -> Any:  # noqa: ARG002
        """The revision and the name and size of every file."""
        listing = self._listing()
        return {"sample": self._sample, **listing}

    def units(self, data: DataConfig, progress: Progress) -> Iterator[Unit]:  # noqa: ARG002
        listing = self._listing()
        for name, size in listing["files"]:
            path = self._folder / name
            if not path.exists():
                progress(f"downloading {name} ({size / 10**6:,.0f} MB)")
                self._download(name, listing["revision"])
            if path.stat().st_size != size:
                text = f"{path} has {path.stat().st_size} bytes, not {size}"
                raise DataError(f"{text}; remove it to download it again")
            for start, stop in divide(path):
                key = f"{REPOSITORY} {self._sample} {listing['revision']} {name} {size}"
                yield {"key": f"{key} {start} {stop}", "path": str(path), "part": [start, stop]}

    def read(self, unit: Unit) -> Iterator[str]:
        start, stop = unit["part"]
        yield from read_documents(Path(unit["path"]), (start, stop))

    @property
    def _folder(self) -> Path:
        return data_folder() / "fineweb-edu" / "sample" / self._sample

    def _listing(self) -> dict[str, Any]:
        """``{"revision": str or None, "files": [[name, bytes], ...]}``, sorted by name."""
        path = self._folder / "listing.json"
        try:
            listing: dict[str, Any] = read_json(path)
            return listing
        except FileNotFoundError:
            pass
        local = sorted(self._folder.glob("*.parquet"))
        if local:
            files = [[file.name, file.stat().st_size] for file in local]
            return {"revision": None, "files": files}
        listing = self._published()
        write_json(path, listing)
        return listing

    def _published(self) -> dict[str, Any]:
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        api, place = HfApi(), f"sample/{self._sample}"
        try:
            # One short question first: the library asks the next ones many times over.
            revision = api.dataset_info(REPOSITORY, timeout=_PATIENCE_SECONDS).sha
            tree = api.list_repo_tree(REPOSITORY, place, repo_type="dataset", revision=revision)
            found = [(Path(file.path).name, file.size) for file in tree
                     if isinstance(file, RepoFile) and file.path.endswith(".parquet")]  # fmt: skip
        except Exception as error:  # the library lets many kinds through, its transport's too
            text = f"{REPOSITORY} cannot be reached ({_reason(error)})"
            way_out = f"connect, or put its {place}/*.parquet into {self._folder}"
            raise DataError(f"{text}; {way_out}") from None
        if not found:
            raise DataError(f"{REPOSITORY} has no parquet files in {place} at {revision}")
        return {"revision": revision, "files": [list(file) for file in sorted(found)]}

    def _download(self, name: str, revision: str | None) -> None:
        from huggingface_hub import hf_hub_download

        try:
            hf_hub_download(
                REPOSITORY,
                f"sample/{self._sample}/{name}",
                repo_type="dataset",
                revision=revision,
                local_dir=os.fspath(self._folder.parent.parent),
            )
        except Exception as error:  # as above
            text = f"{REPOSITORY}, {name} could not be downloaded ({_reason(error)})"
            raise DataError(f"{text}; run again, what is there is kept") from None


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
