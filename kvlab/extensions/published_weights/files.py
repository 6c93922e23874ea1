"""Find and check checkpoints in Hugging Face's format, in a folder or a repository, without torch.

Nothing in a checkpoint is trusted: no code of it runs, no pickle is opened, and its sizes are
compared with each other before memory is taken.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from kvlab.data.data_dir import cached_sha256
from kvlab.errors import DataError, PretrainedError
from kvlab.fs.atomic_files import open_regular, parse_json, read_regular
from kvlab.humanize import summarize_error

DOWNLOAD_PATTERNS = ["config.json", "*.safetensors", "*.safetensors.index.json"]

MAX_CONFIG_BYTES = 1_000_000
MAX_HEADER_BYTES = 100_000_000
"""As in the reference implementation of safetensors."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I16": 16, "F16": 16,
    "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?\Z")


def resolve_checkpoint_folder(path_or_repo: str | Path, *, download: bool = True) -> Path:
    """Return ``path_or_repo`` if it is a folder, or the local copy of that repository of the hub.

    Args:
        download: Download missing files; otherwise only the hub's local cache is used.

    Raises:
        PretrainedError: It is neither, or the hub cannot be reached.
    """
    folder = Path(path_or_repo)
    if folder.is_dir():
        return folder
    hint = "name a folder with config.json and *.safetensors"
    if not _REPOSITORY.match(str(path_or_repo)):
        raise PretrainedError(f"{path_or_repo} is not a folder; {hint}, or a repository")
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"local_files_only": not download}
    try:
        found = snapshot_download(str(path_or_repo), allow_patterns=DOWNLOAD_PATTERNS, **options)
        return Path(found)
    except Exception as error:  # the library raises many kinds
        reason = summarize_error(error)
        text = f"{path_or_repo} is not a folder, and is not available from the hub: {reason}"
        raise PretrainedError(f"{text}; {hint}") from None


def list_checkpoint_files(folder: Path) -> list[Path]:
    """Return the files that a model is read from: ``config.json``, then every ``*.safetensors``.

    Raises:
        PretrainedError: One of the two is missing.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        text = "only safetensors are read, as other formats can run code"
        found = f"{folder} has no *.safetensors"
        for name in sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES):
            hint = "convert it with safetensors.torch.save_file where you trust it"
            raise PretrainedError(f"{found} beside {name}, which is not opened; {text}; {hint}")
        raise PretrainedError(f"{found}; {text}")
    if not (folder / "config.json").is_file():
        text = f"{folder} has no config.json, which says what the weights are"
        raise PretrainedError(f"{text}; copy it there, or name another folder")
    return [folder / "config.json", *weights]


def identify_checkpoint(location: str, *, download: bool = True) -> dict[str, str]:
    """Return the sha256 of each file that a model is read from, by file name.

    Raises:
        PretrainedError: there is no such checkpoint, or one of its files is missing.
    """
    files = list_checkpoint_files(resolve_checkpoint_folder(location, download=download))
    try:
        digests = cached_sha256([path.resolve() for path in files])
    except DataError as error:
        raise PretrainedError(str(error)) from None
    return {path.name: digests[path.resolve()] for path in files}


def read_checkpoint_config(folder: Path) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        PretrainedError: It is missing, is no JSON object, or names code of the checkpoint.
    """
    path = folder / "config.json"
    try:
        data = read_regular(path, MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise ValueError(f"it is larger than {MAX_CONFIG_BYTES:,} bytes")
        config = parse_json(data)
        if not isinstance(config, dict):
            raise ValueError("it is no object of settings")
    except FileNotFoundError:
        text = f"{folder} is no checkpoint: it has no config.json"
        raise PretrainedError(f"{text}; name a folder in Hugging Face's form") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or summarize_error(error)
        raise PretrainedError(f"{path} cannot be read: {reason}") from None
    if "auto_map" in config:
        text = "auto_map names code of the checkpoint, which kvlab never runs; remove auto_map"
        raise PretrainedError(f"{path}: {text} if its model is a plain one of its model_type")
    return config


def check_tensor_file(path: Path) -> int:
    """Check the header of a safetensors file against itself and the file's size.

    Tensors have to fill the file without a gap or an overlap, as the format says.

    Returns:
        The number of elements of all tensors.

    Raises:
        PretrainedError: The file is not what its header says.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"its header would have {length:,} bytes, of {size:,} in the file")
            header = parse_json(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no object of tensors")
        header.pop("__metadata__", None)
        return _check_layout(header, size - 8 - length)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or summarize_error(error)
        raise PretrainedError(f"{path} cannot be read: {reason}") from None


def _check_layout(header: dict[str, Any], data_bytes: int) -> int:
    """Return the elements of all tensors, which together have to fill ``data_bytes``."""
    spans, elements, position = [], 0, 0
    for name, facts in header.items():
        shape, (begin, end) = _read_tensor_facts(name, facts)
        if end - begin != math.prod(shape) * _DTYPE_BITS[facts["dtype"]] // 8:
            raise ValueError(f"{_quote(name)} of shape {shape} cannot have {end - begin:,} bytes")
        spans.append((begin, end, name))
        elements += math.prod(shape)
    for begin, end, name in sorted(spans):
        if begin != position:
            raise ValueError(f"{_quote(name)} begins at byte {begin:,}, not at {position:,}")
        position = end
    if position != data_bytes:
        raise ValueError(f"its tensors end at byte {position:,} of {data_bytes:,}")
    return elements


def _read_tensor_facts(name: str, facts: Any) -> tuple[list[int], tuple[int, int]]:
    """Return shape and place of a tensor, after a check of their types."""
    if not isinstance(facts, dict) or not {"dtype", "shape", "data_offsets"} <= facts.keys():
        raise ValueError(f"{_quote(name)} has no dtype, shape and data_offsets")
    shape, offsets = facts["shape"], facts["data_offsets"]
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"{_quote(name)} has a shape or offsets that are no counts")
    if facts["dtype"] not in _DTYPE_BITS or len(offsets) != 2:
        raise ValueError(f"{_quote(name)} has the dtype {_quote(facts['dtype'])}, which is unknown")
    return shape, (offsets[0], offsets[1])


def _quote(text: Any) -> str:
    """Return a name from a file, short, without characters that a terminal would obey."""
    return json.dumps(text)[:80]
