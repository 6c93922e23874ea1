"""Checkpoints of a running training: one folder each, written atomically.

    checkpoints/step-00000100/model.safetensors       parameters by name
                              optimizer.safetensors   AdamW's state: exp_avg.<parameter>, ...
                              state.json              `TrainingState`, and the files' sha256

A folder gets its name only after everything in it is on disk. If a disk loses bytes all the same,
the hashes detect it, and the previous checkpoint is used.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from kvlab.errors import StoreError
from kvlab.fs.atomic_files import file_sha256, read_json, write_json
from kvlab.fs.lease import Fence
from kvlab.spec.experiment import Experiment
from kvlab.train.tensor_files import copy_weights, fsync_path, read_tensors, write_tensors
from kvlab.train.training_record import Curve

_FILES = ("model.safetensors", "optimizer.safetensors")
_log = logging.getLogger(__name__)


@dataclass
class TrainingState:
    """State of a training apart from its tensors.

    Attributes:
        step: optimizer steps taken. The batches and the schedule are functions of it.
        seconds: time in all steps.
        timed_seconds, timed_steps: time and number of the steps that count for the rate.
        pending: losses since the last point of the curve.
        recent, lowest: arguments of `kvlab.train.divergence.check_spike`.
        train_curve, validation_curve, resumed_from: as in `TrainingRecord`.
    """

    step: int = 0
    seconds: float = 0.0
    timed_seconds: float = 0.0
    timed_steps: int = 0
    pending: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    lowest: float | None = None
    train_curve: Curve = field(default_factory=list)
    validation_curve: Curve = field(default_factory=list)
    resumed_from: list[int] = field(default_factory=list)


def resume_identity(
    experiment: Experiment, seed: int, train_tokens: int, initial_weights: Any = None
) -> str:
    """Return a hash of what two runs must have in common for one to resume the other.

    Args:
        initial_weights: identity of the initial weights; None if they are freshly drawn.
    """
    facts = {
        "model": experiment.model.computation(),
        "training": experiment.training.identity(),
        "seed": seed,
        "train_tokens": train_tokens,
    }
    if experiment.data.mask_documents:
        facts["mask_documents"] = True
    if initial_weights is not None:
        facts["start"] = initial_weights
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class Checkpoints:
    """The checkpoints of one training directory, which no other training uses meanwhile.

    Args:
        identity: see `resume_identity`.
        keep_last: number of newest checkpoints to keep.
        keep_best: number of checkpoints with the lowest validation loss to keep as well.
        fence: of the lock on ``directory``, checked before each file is put in place.
    """

    def __init__(
        self,
        directory: Path,
        identity: str,
        keep_last: int,
        keep_best: int,
        fence: Fence | None = None,
    ):
        self._fence = fence
        self._folder, self._identity = directory / "checkpoints", identity
        self._keep_last, self._keep_best = keep_last, keep_best

    def save(self, model: nn.Module, optimizer: Optimizer, state: TrainingState) -> None:
        """Write a checkpoint, then remove those that are not to be kept.

        Raises:
            StoreError: the disk is full or gone; earlier checkpoints stay.
            LeaseLost: another process has taken this training over.
        """
        temporary = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=".step-", dir=self._folder))
            self._write_files(temporary, model, optimizer, state)
            path = self._folder / f"step-{state.step:08d}"
            if self._fence is not None:
                self._fence.check()
            if path.exists():  # it is damaged, otherwise this run had resumed from it
                shutil.rmtree(path)
            os.rename(temporary, path)
            fsync_path(self._folder)
        except OSError as error:
            text = f"{self._folder} cannot be written: {error.strerror}"
            raise StoreError(f"{text}; free or repair the disk, run again") from None
        finally:
            if temporary is not None and temporary.exists():
                shutil.rmtree(temporary, ignore_errors=True)
        self._remove_all_but(self._list_newest_first()[: self._keep_last])

    def _write_files(
        self, folder: Path, model: nn.Module, optimizer: Optimizer, state: TrainingState
    ) -> None:
        parameters = dict(model.named_parameters())
        write_tensors(folder / _FILES[0], parameters, self._fence)
        write_tensors(folder / _FILES[1], _optimizer_tensors(optimizer, parameters), self._fence)
        hashes = {name: file_sha256(folder / name) for name in _FILES}
        content = {"schema": 1, "identity": self._identity, "sha256": hashes}
        write_json(folder / "state.json", {**content, "state": asdict(state)}, fence=self._fence)
        fsync_path(folder)

    def resume(self, model: nn.Module, optimizer: Optimizer) -> TrainingState | None:
        """Load the newest intact checkpoint into ``model`` and ``optimizer``.

        Returns:
            Its state, or None if there is no checkpoint.

        Raises:
            StoreError: a checkpoint belongs to another training.
        """
        self._remove_leftovers()
        for folder in self._list_newest_first():
            try:
                identity, state = self._read_state(folder)
                tensors = [read_tensors(folder / name) for name in _FILES]
            except (StoreError, OSError, KeyError, TypeError, ValueError) as error:
                _log.warning("%s is damaged (%s); trying the one before", folder, error)
                continue
            if identity != self._identity:
                text = f"{folder} belongs to another training"
                raise StoreError(f"{text}; remove {self._folder} or use another directory")
            copy_weights(model, tensors[0], folder / _FILES[0])
            _restore_optimizer(optimizer, dict(model.named_parameters()), tensors[1])
            state.resumed_from.append(state.step)
            return state
        return None

    def remove_all_but_best(self) -> None:
        """Remove what a finished training does not keep."""
        if self._keep_best:
            self._remove_leftovers()
            self._remove_all_but([])
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _remove_all_but(self, recent: list[Path]) -> None:
        """Remove all checkpoints but ``recent`` and the best."""
        folders = self._list_newest_first()
        losses = {folder: _validation_loss(folder) for folder in folders if self._keep_best}
        ranked = sorted((loss, folder) for folder, loss in losses.items() if loss is not None)
        best = [folder for _, folder in ranked[: self._keep_best]]
        for folder in folders:
            if folder not in recent and folder not in best:
                shutil.rmtree(folder, ignore_errors=True)

    def _read_state(self, folder: Path) -> tuple[str, TrainingState]:
        """Return the identity and state of a checkpoint after checking its files."""
        content: dict[str, Any] = read_json(folder / "state.json")
        for name in _FILES:
            if file_sha256(folder / name) != content["sha256"][name]:
                raise ValueError(f"{name} is not what was written")
        return content["identity"], TrainingState(**content["state"])

    def _list_newest_first(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"), reverse=True)

    def _remove_leftovers(self) -> None:
        for folder in self._folder.glob(".step-*"):  # left by a kill during a write
            shutil.rmtree(folder, ignore_errors=True)


def _validation_loss(folder: Path) -> float | None:
    """Return the validation loss at a checkpoint's step; None if it is missing or damaged."""
    try:
        state = read_json(folder / "state.json")["state"]
        last = state["validation_curve"][-1]
        return float(last[2]) if last[0] == state["step"] else None
    except (StoreError, OSError, KeyError, TypeError, IndexError):
        return None


def _optimizer_tensors(
    optimizer: Optimizer, parameters: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    return {
        f"{key}.{name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
    }


def _restore_optimizer(
    optimizer: Optimizer, parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor]
) -> None:
    for qualified_name, tensor in tensors.items():
        key, _, name = qualified_name.partition(".")
        parameter = parameters[name]
        # cloned, since the tensor that was read maps the file
        optimizer.state[parameter][key] = tensor.clone().to(parameter.device)
