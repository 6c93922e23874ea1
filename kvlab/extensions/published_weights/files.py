"""Find and check checkpoints in Hugging Face's format, in a folder or a repository, without torch.

Nothing in a checkpoint is trusted: no code of it runs, and no pickle is opened.
"""

import re
from pathlib import Path
from typing import Any

from kvlab.data.data_dir import cached_sha256
from kvlab.errors import DataError, PretrainedError
from kvlab.fs.atomic_files import parse_json, read_regular
from kvlab.humanize import summarize_error

DOWNLOAD_PATTERNS = [
    "config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json",
]  # fmt: skip

MAX_CONFIG_BYTES = 1_000_000

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

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
    hint = "name the folder of a checkpoint"
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
    try:
        config = read_checkpoint_json(folder, "config.json", MAX_CONFIG_BYTES)
    except FileNotFoundError:
        text = f"{folder} is no checkpoint: it has no config.json"
        raise PretrainedError(f"{text}; name a folder in Hugging Face's form") from None
    if "auto_map" in config:
        text = "auto_map names code of the checkpoint, which kvlab never runs; remove auto_map"
        hint = "if its model is a plain one of its model_type"
        raise PretrainedError(f"{folder}/config.json: {text} {hint}")
    return config


def read_checkpoint_json(folder: Path, name: str, limit: int) -> dict[str, Any]:
    """Return the settings of a JSON file of a checkpoint, of at most ``limit`` bytes.

    Raises:
        PretrainedError: It cannot be read, or is no JSON object.
        FileNotFoundError: It is missing.
    """
    path = folder / name
    try:
        data = read_regular(path, limit + 1)
        if len(data) > limit:
            raise ValueError(f"it is larger than {limit:,} bytes")
        settings = parse_json(data)
        if not isinstance(settings, dict):
            raise ValueError("it is no object of settings")
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or summarize_error(error)
        raise PretrainedError(f"{path} cannot be read: {reason}") from None
    return settings
