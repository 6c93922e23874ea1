"""Checkpoints of a running training: a folder each, written whole or not at all.

    checkpoints/step-00000100/model.safetensors       parameters by name
                              optimizer.safetensors   AdamW's state: exp_avg.<parameter>, ...
                              state.json              where the run is, and the files' sha256

A folder gets its name only once everything in it is on the disk. Should a disk lose bytes all
the same, the sha256 tells, and the checkpoint before it is used.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
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
    """Where a training is, apart from tensors.

    Attributes:
        step: optimizer steps done. The batches, the schedule and all else follow from it.
        seconds, timed_seconds, timed_steps: in all steps; in, and number of, those that count
            for the rate.
        pending: losses of the steps since the last point of the curve.
        recent, lowest: what `kvlab.train.divergence.check_spike` looks at.
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


def resume_identity(experiment: Experiment, seed: int, train_tokens: int, start: Any = None) -> str:
    """sha256 of what makes two runs the same, so that one does not go on from another's state."""
    facts = {
        "model": experiment.model.computation(),
        "training": experiment.training.identity(),
        "seed": seed,
        "train_tokens": train_tokens,
    }
    if experiment.data.mask_documents:
        facts["mask_documents"] = True
    if start is not None:
        facts["start"] = start
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class Checkpoints:
    """The checkpoints of one training directory, which no other training uses meanwhile.

    Args:
        keep_last: the newest that stay when one is written.
        keep_best: those of lowest validation loss that stay too.
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
        """Writes a checkpoint, then removes those that the policy does not keep.

        Raises:
            StoreError: the disk is full or gone; earlier checkpoints stay.
            LeaseLost: another process has taken this training over.
        """
        temporary = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=".step-", dir=self._folder))
            self._fill(temporary, model, optimizer, state)
            place = self._folder / f"step-{state.step:08d}"
            if self._fence is not None:
                self._fence.check()
            if place.exists():  # damaged, or we would have gone on from it
                shutil.rmtree(place)
            os.rename(temporary, place)
            fsync_path(self._folder)
        except OSError as error:
            text = f"{self._folder} cannot be written: {error.strerror}"
            raise StoreError(f"{text}; free or repair the disk, run again") from None
        finally:
            if temporary is not None and temporary.exists():
                shutil.rmtree(temporary, ignore_errors=True)
        self._keep(list(self._newest_first())[: self._keep_last])

    def _fill(
        self, folder: Path, model: nn.Module, optimizer: Optimizer, state: TrainingState
    ) -> None:
        parameters = dict(model.named_parameters())
        write_tensors(folder / _FILES[0], parameters, self._fence)
        write_tensors(folder / _FILES[1], _optimizer_tensors(optimizer, parameters), self._fence)
        digests = {name: file_sha256(folder / name) for name in _FILES}
        facts = {"schema": 1, "identity": self._identity, "sha256": digests}
        write_json(folder / "state.json", {**facts, "state": asdict(state)}, fence=self._fence)
        fsync_path(folder)

    def resume(self, model: nn.Module, optimizer: Optimizer) -> TrainingState | None:
        """Loads the newest whole checkpoint; None if there is none.

        Raises:
            StoreError: a checkpoint belongs to another training.
        """
        self._remove_leftovers()
        for folder in self._newest_first():
            try:
                identity, state = self._checked(folder)
                tensors = [read_tensors(folder / name) for name in _FILES]
            except (StoreError, OSError, KeyError, TypeError, ValueError) as error:
                _log.warning("%s is damaged (%s); going on from the one before", folder, error)
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
        """What is left when the training is finished."""
        if self._keep_best:
            self._remove_leftovers()
            self._keep([])
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _keep(self, wanted: list[Path]) -> None:
        """Removes all but ``wanted`` and the best."""
        folders = list(self._newest_first())
        scores = {folder: _validation_loss(folder) for folder in folders if self._keep_best}
        scored = sorted((score, folder) for folder, score in scores.items() if score is not None)
        best = [folder for _, folder in scored[: self._keep_best]]
        for folder in folders:
            if folder not in wanted and folder not in best:
                shutil.rmtree(folder, ignore_errors=True)

    def _checked(self, folder: Path) -> tuple[str, TrainingState]:
        found: dict[str, Any] = read_json(folder / "state.json")
        for name in _FILES:
            if file_sha256(folder / name) != found["sha256"][name]:
                raise ValueError(f"{name} is not what was written")
        return found["identity"], TrainingState(**found["state"])

    def _newest_first(self) -> Iterator[Path]:
        yield from sorted(self._folder.glob("step-*"), reverse=True)

    def _remove_leftovers(self) -> None:
        for folder in self._folder.glob(".step-*"):  # a kill while writing
            shutil.rmtree(folder, ignore_errors=True)


def _validation_loss(folder: Path) -> float | None:
    """The validation loss at a checkpoint's step; None if there is none, or it is damaged."""
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
    for full, tensor in tensors.items():
        key, _, name = full.partition(".")
        parameter = parameters[name]
        optimizer.state[parameter][key] = tensor.clone().to(parameter.device)  # not the file
