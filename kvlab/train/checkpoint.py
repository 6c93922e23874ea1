"""Checkpoints of a running training: one folder each, written atomically.

    checkpoints/step-00000100/model.safetensors       parameters by name
                              optimizer.safetensors   its state: exp_avg.<parameter>, ...
                              state.json              `TrainingState`, and the files' sha256

A folder gets its name only after everything in it is on disk. If a disk loses bytes all the same,
the hashes detect it, and the previous checkpoint is used. Beside a GPU a thread writes: the
training goes on once the tensors are copied.

Trainings of several token budgets under wsd share a `Trunk`: checkpoints of their stable phase.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from kvlab.errors import RecordDamaged, StoreError
from kvlab.fs import sealed_files
from kvlab.fs.lease import Fence
from kvlab.spec.experiment import Experiment
from kvlab.train.tensor_files import copy_weights, fsync_path, read_tensors, write_tensors
from kvlab.train.training_record import Curve

_FILES = ("model.safetensors", "optimizer.safetensors")
_STATE_FILE = "state.json"
_log = logging.getLogger(__name__)

KEPT = 2
"""Newest checkpoints that a training keeps, as the last one may be damaged."""


@dataclass
class TrainingState:
    """State of a training apart from its tensors.

    Attributes:
        step: optimizer steps taken. The batches and the schedule are functions of it.
        seconds: time in all steps.
        timed_seconds, timed_steps: time and number of the steps that count for the rate.
        losses: of every step, in nats per token. The curve is made of them at the end, since the
            steps between its points depend on the token budget.
        lowest: argument of `kvlab.train.train_step.check_spike`.
        validation_curve, resumed_from, branched_at, checkpoint_seconds, compile_seconds, code: as
            in `TrainingRecord`.
    """

    step: int = 0
    seconds: float = 0.0
    timed_seconds: float = 0.0
    timed_steps: int = 0
    losses: list[float] = field(default_factory=list)
    lowest: float | None = None
    validation_curve: Curve = field(default_factory=list)
    resumed_from: list[int] = field(default_factory=list)
    branched_at: int | None = None
    checkpoint_seconds: float = 0.0
    compile_seconds: float = 0.0
    code: list[str] = field(default_factory=lambda: [""])


@dataclass(frozen=True)
class Trunk:
    """The stable phase of wsd that trainings of several token budgets have in common.

    Until its decay a training does not depend on ``tokens``, ``decay_tokens`` or
    ``final_learning_rate``: the checkpoint after any of these steps is bitwise that of every such
    budget (Hägele et al., arXiv 2405.18392, for the idea).

    Attributes:
        directory: of the store; named by the fingerprint of all that the budgets have in common.
        steps: steps after which a checkpoint is kept, since other budgets branch there.
    """

    directory: Path
    steps: frozenset[int] = frozenset()

    def path(self, step: int) -> Path:
        return self.directory / _folder_name(step)

    def newest(self, last_step: int) -> Path | None:
        """Return the checkpoint with the most steps, at most ``last_step``; None without any."""
        last = self.path(last_step)
        return max((one for one in self.directory.glob("step-*") if one <= last), default=None)


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"


def resume_identity(
    experiment: Experiment, seed: int, train_tokens: int, initial_weights: Any = None
) -> str:
    """Return a hash of what two runs must have in common for one to resume the other.

    Args:
        initial_weights: identity of the initial weights; None if they are freshly drawn.
    """
    facts = {
        "model": experiment.model.computation(),
        "training": experiment.training.identity_of(experiment.model),
        "seed": seed,
        "train_tokens": train_tokens,
    }
    if experiment.data.mask_documents:
        facts["mask_documents"] = True
    if initial_weights is not None:
        facts["start"] = initial_weights
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(eq=False)
class Checkpoints:
    """The checkpoints of one training directory, which no other training uses meanwhile.

    Args:
        identity: see `resume_identity`.
        fence: of the lock on ``directory``, checked before each file is put in place.
        is_background: write from a thread.
    """

    directory: Path
    identity: str
    fence: Fence | None
    is_background: bool

    def __post_init__(self) -> None:
        self._folder = self.directory / "checkpoints"
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def save(self, model: nn.Module, optimizer: Optimizer, state: TrainingState) -> None:
        """Write a checkpoint, then remove all but the newest `KEPT`.

        From a thread, the tensors are copied now and written later: `wait` for it. The checkpoint
        before is waited for here.

        Raises:
            StoreError: the disk is full or gone; earlier checkpoints stay.
            LeaseLost: another process has taken this training over.
        """
        self.wait()
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        moments = {
            f"{key}.{name}": value
            for name, parameter in parameters.items()
            for key, value in optimizer.state[parameter].items()
        }
        tensors = parameters, moments
        if not self.is_background:
            self._write(tensors, asdict(state))
            return
        copies = [
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in part.items()}
            for part in tensors
        ]
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending = self._writer.submit(self._write, copies, asdict(state))

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk.

        Raises:
            StoreError, LeaseLost: it could not be written; see `save`.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def raise_errors(self) -> None:
        """Raise what kept the last checkpoint from being written, if that is known by now."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def close(self) -> None:
        """Let the thread finish what it writes, and end it. Its errors are dropped."""
        if self._writer is not None:
            self._writer.shutdown()
        self._writer = self._pending = None

    def _write(self, tensors: Sequence[Mapping[str, Tensor]], state: dict[str, Any]) -> None:
        with self._new_folder(self._folder / _folder_name(state["step"])) as folder:
            for name, part in zip(_FILES, tensors, strict=True):
                write_tensors(folder / name, part, self.fence)
            files = {name: sealed_files.seal_file(folder / name) for name in _FILES}
            content = {"schema": 1, "identity": self.identity, "files": files, "state": state}
            sealed_files.write_sealed_json(folder / _STATE_FILE, content, fence=self.fence)
            fsync_path(folder)
        for older in self._list_newest_first()[KEPT:]:
            shutil.rmtree(older, ignore_errors=True)

    def share(self, step: int, trunk: Trunk) -> None:
        """Add the checkpoint of ``step`` to a trunk, unless it has that step.

        Raises:
            StoreError: the disk is full or gone.
            LeaseLost: another process has taken this training over.
        """
        source, target = self._folder / _folder_name(step), trunk.path(step)
        if target.exists():
            return
        with self._new_folder(target, keep_other=True) as folder:
            for name in (*_FILES, _STATE_FILE):
                _link_or_copy(source / name, folder / name)

    def branch(self, trunk: Trunk, last_step: int) -> bool:
        """Make the newest checkpoint of a trunk one of this training.

        Args:
            last_step: steps of the trunk from then on are not this training's.

        Returns:
            False if the trunk has none that can be used: garbage collection may remove it
            meanwhile. Then the training takes these steps itself.
        """
        source = trunk.newest(last_step)
        if source is None:
            return False
        try:
            content = read_checkpoint(source)
            own = {"resumed_from": [], "branched_at": content["state"]["step"]}
            content |= {"identity": self.identity, "state": {**content["state"], **own}}
            with self._new_folder(self._folder / source.name) as folder:
                for name in _FILES:
                    _link_or_copy(source / name, folder / name)
                sealed_files.write_sealed_json(folder / _STATE_FILE, content, fence=self.fence)
        except RecordDamaged as error:
            aside = sealed_files.set_aside(trunk.directory, [source.name])
            _log.warning("%s; moved to %s, trying the checkpoint before", error, aside)
            return self.branch(trunk, last_step)
        except StoreError:  # garbage collection has removed it meanwhile
            return False
        return True

    @contextmanager
    def _new_folder(self, path: Path, *, keep_other: bool = False) -> Iterator[Path]:
        """Yield a folder to be filled, which becomes ``path`` when it is whole.

        Args:
            keep_other: leave a folder that another process has put at ``path`` meanwhile.
        """
        try:
            for parent in (self._folder, path.parent):
                parent.mkdir(parents=True, exist_ok=True)
            # in the own folder, also if it is for a trunk: others may tidy up there
            with tempfile.TemporaryDirectory(
                prefix=".step-", dir=self._folder, ignore_cleanup_errors=True
            ) as temporary:
                yield Path(temporary)
                if self.fence is not None:
                    self.fence.check()
                if not keep_other and path.exists():  # damaged, or this run had resumed from it
                    shutil.rmtree(path)
                try:
                    os.rename(temporary, path)
                except OSError:
                    if not (keep_other and path.exists()):
                        raise
            fsync_path(path.parent)
        except OSError as error:
            text = f"{path.parent} cannot be written: {error.strerror}"
            raise StoreError(f"{text}; free or repair the disk, run again") from None

    def resume(self, model: nn.Module, optimizer: Optimizer) -> TrainingState | None:
        """Load the newest intact checkpoint into ``model`` and ``optimizer``.

        Returns:
            Its state, or None if there is no checkpoint.

        Raises:
            StoreError: a checkpoint belongs to another training.
        """
        for leftover in self._folder.glob(".step-*"):  # of a kill during a write
            shutil.rmtree(leftover, ignore_errors=True)
        for folder in self._list_newest_first():
            try:
                content = read_checkpoint(folder)
                sealed_files.check_form(folder / _STATE_FILE, content["state"], TrainingState)
                state = TrainingState(**content["state"])
                tensors = [read_tensors(folder / name) for name in _FILES]
            except (RecordDamaged, TypeError) as error:  # or of an older version of kvlab
                names = [f"{self._folder.name}/{folder.name}"]
                aside = sealed_files.set_aside(self._folder.parent, names, self.fence)
                _log.warning("%s; moved to %s, trying the checkpoint before", error, aside)
                continue
            if content["identity"] != self.identity:
                text = f"{folder} belongs to another training"
                raise StoreError(f"{text}; remove {self._folder} or use another directory")
            copy_weights(model, tensors[0], folder / _FILES[0])
            parameters = dict(model.named_parameters())
            for qualified_name, tensor in tensors[1].items():
                key, _, name = qualified_name.partition(".")
                # cloned, since the tensor that was read maps the file
                own = tensor.clone().to(parameters[name].device)
                optimizer.state[parameters[name]][key] = own
            state.resumed_from.append(state.step)
            return state
        return None

    def remove(self) -> None:
        """Remove the checkpoints of a finished training."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _list_newest_first(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"), reverse=True)


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's ``state.json``, after a check of all its files.

    Raises:
        RecordDamaged: A file is missing, or is not what was written.
    """
    try:
        content = sealed_files.read_sealed_json(folder / _STATE_FILE, "identity", "files", "state")
        if not isinstance(content["state"], dict) or not content["files"].keys() >= set(_FILES):
            raise RecordDamaged(f"{folder / _STATE_FILE} is damaged: it has no state or no files")
    except FileNotFoundError:
        raise RecordDamaged(f"{folder / _STATE_FILE} is missing") from None
    for name in _FILES:
        sealed_files.check_file(folder / name, content["files"][name])
    return content


def _link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name. Files of checkpoints are never written in place."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
