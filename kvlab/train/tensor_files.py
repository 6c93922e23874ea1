"""Read and write tensors as safetensors files, atomically."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvlab.errors import RecordDamaged, StoreError
from kvlab.fs.atomic_files import replace_file
from kvlab.fs.lease import Fence
from kvlab.fs.sealed_files import check_file, read_sealed_json

FINAL_WEIGHTS = Path("final") / "model.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], fence: Fence | None = None) -> None:
    """Write named tensors. A kill at any moment leaves the old file or the new one.

    Only one process may write ``path`` at a time.

    Args:
        fence: of the lock on the folder, checked before the file is put in place.

    Raises:
        StoreError: the folder cannot be written or the disk is full; the old file stays.
        LeaseLost: this process no longer holds the lock.
    """
    folder = path.parent
    if fence is not None:
        fence.check()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f".{path.name}.*"):  # left by a kill during a write
            shutil.rmtree(leftover)
        on_cpu = {name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}
        # in a folder, because the library makes temporary files of its own beside its output
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=folder) as temporary:
            written = Path(temporary) / path.name
            save_file(on_cpu, written, metadata={"format": "pt"})
            fsync_path(written)
            os.chmod(written, 0o644)
            replace_file(written, path, fence)
        fsync_path(folder)
    except (OSError, SafetensorError) as error:
        text = f"{path} cannot be written: {error}"
        raise StoreError(f"{text}; free or repair the disk, run again") from None


def fsync_path(path: str | Path) -> None:
    """Wait until the bytes of a file, or the entries of a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the named tensors of one file.

    Raises:
        StoreError: it is missing or damaged.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from None


def copy_weights(model: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Copy ``tensors`` into the model's parameters of the same names.

    Args:
        source: the file that they come from, for the error message.

    Raises:
        StoreError: names or shapes are not the model's; nothing is copied.
    """
    parameters = dict(model.named_parameters())
    own, read = ({n: t.shape for n, t in one.items()} for one in (parameters, tensors))
    mismatched = {name for name, _ in own.items() ^ read.items()}
    if mismatched:
        count = f"{len(mismatched)} tensors differ, such as {min(mismatched)}"
        text = f"{source} does not fit the model: {count}"
        raise StoreError(f"{text}; it was trained as another configuration")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def read_final_weights(directory: str | Path) -> dict[str, Tensor]:
    """Return the final weights of the training in ``directory`` by parameter name.

    Raises:
        RecordDamaged: there are none, or they are not those that the training's record lists.
    """
    directory = Path(directory)
    try:
        record = read_sealed_json(directory / "training.json", "files")
    except FileNotFoundError:
        text = f"{directory} holds no finished training"
        raise RecordDamaged(f"{text}; submit its sweep again") from None
    check_file(directory / FINAL_WEIGHTS, record["files"][FINAL_WEIGHTS.as_posix()])
    try:
        return read_tensors(directory / FINAL_WEIGHTS)
    except StoreError as error:  # moved aside since, as another trial has found it damaged
        raise RecordDamaged(str(error)) from None


def load_final_weights(model: nn.Module, directory: str | Path) -> None:
    """Load the final weights of the training in ``directory`` into ``model``.

    Raises:
        RecordDamaged: they are not those that the training's record lists.
        StoreError: there are none, or they belong to another model.
    """
    copy_weights(model, read_final_weights(directory), Path(directory) / FINAL_WEIGHTS)
