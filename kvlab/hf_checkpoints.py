"""Find checkpoints in Hugging Face's format, in a folder or a repository, without torch."""

import re
from pathlib import Path

from kvlab.errors import PretrainedError
from kvlab.humanize import summarize_error

DOWNLOAD_PATTERNS = ["config.json", "*.safetensors", "*.safetensors.index.json"]

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

    try:
        return Path(
            snapshot_download(
                str(path_or_repo), allow_patterns=DOWNLOAD_PATTERNS, local_files_only=not download
            )
        )
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
        raise PretrainedError(f"{folder} has no *.safetensors; {text}")
    if not (folder / "config.json").is_file():
        text = f"{folder} has no config.json, which says what the weights are"
        raise PretrainedError(f"{text}; copy it there, or name another folder")
    return [folder / "config.json", *weights]
