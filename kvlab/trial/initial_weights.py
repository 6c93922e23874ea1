"""Decide where a training's initial weights come from (`training.init_from`). Imports no torch.

A training starts from freshly drawn weights, from a published checkpoint, or from the final
weights of another training of the same sweep. `kvlab.spec.sweep_validation` checks what a sweep
file asks for, `InitialWeightsResolver` turns it into an `InitialWeights` while the sweep is
planned, and `kvlab.trial.initial_weights_loader` puts the tensors into the model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.errors import PretrainedError, SpecError
from kvlab.own_extensions import name_members
from kvlab.spec import ResourcesConfig
from kvlab.spec.checkpoint_tools import find_checkpoint_tool
from kvlab.spec.sweep import Cell, Sweep
from kvlab.spec.validation_errors import FieldError
from kvlab.store import Store
from kvlab.trial.fingerprint import ID_LENGTH, fingerprint

if TYPE_CHECKING:
    from kvlab.trial.trial import Trial

TrialOf = Callable[[Cell, int], "Trial"]
"""Return the trial of a cell at a seed."""


@dataclass(frozen=True)
class CheckpointWeights:
    """Weights of a published checkpoint.

    Attributes:
        name: the repository, or a folder's last name; shown in the record.
        location: the repository, or the folder's absolute path.
        identity: sha256 of each file that a model is read from, by file name.
    """

    name: str
    location: str
    identity: dict[str, str]


@dataclass(frozen=True)
class TrainedWeights:
    """Final weights of another training, which must be done first.

    Attributes:
        name: the factor levels that lead to it, and the seed; shown in the record.
        fingerprint: its training fingerprint.
        trial: one that has this training, to train it again if its weights are lost.
    """

    name: str
    fingerprint: str
    trial: "Trial" = field(compare=False)

    def trial_with(self, resources: ResourcesConfig) -> "Trial":
        """Return the trial as it trains with the resources of another one."""
        experiment = self.trial.experiment.model_copy(update={"resources": resources})
        return replace(self.trial, experiment=experiment)

    @property
    def training_id(self) -> str:
        return self.fingerprint[:ID_LENGTH]

    @property
    def identity(self) -> dict[str, str]:
        return {"training": self.fingerprint}


InitialWeights = CheckpointWeights | TrainedWeights


class InitialWeightsResolver:
    """Resolve `training.init_from` of the cells of a sweep.

    Args:
        sweep: gives the file, line and column of errors.
        cells: where other trainings are looked up.
        provisional: do not download a repository that is not on this machine; list it in
            ``absent`` instead.

    Attributes:
        absent: why checkpoints are not on this machine, one line each.
    """

    def __init__(self, sweep: Sweep, cells: Sequence[Cell], *, provisional: bool):
        self._sweep, self._provisional = sweep, provisional
        self._cells = {cell.key: cell for cell in cells}
        self._checkpoints: dict[str, CheckpointWeights] = {}
        self.absent: list[str] = []

    def resolve(self, cell: Cell, seed: int, trial_of: TrialOf) -> InitialWeights | None:
        """Return the initial weights of a cell at a seed; None if they are freshly drawn.

        Raises:
            SpecError: a checkpoint is unavailable.
        """
        init_from = cell.experiment.training.init_from
        if isinstance(init_from, dict) and cell.source_key is not None:
            # `kvlab.spec.sweep_validation` has made sure that this cell exists.
            trial = trial_of(self._cells[cell.source_key], seed)
            # Name the levels in init_from only, so that trials which share a training agree.
            name = " ".join(f"{factor}={init_from[factor]}" for factor in sorted(init_from))
            return TrainedWeights(
                f"{name}, seed {seed}", fingerprint(trial.training_identity()), trial
            )
        if not isinstance(init_from, str):
            return None
        if init_from not in self._checkpoints:
            is_path = Path(init_from).is_absolute()
            name = Path(init_from).name if is_path else init_from
            try:
                identify = find_checkpoint_tool("identify")
                identity = identify(init_from, download=not self._provisional)
            except PretrainedError as error:
                if not self._provisional or is_path or not name_members("checkpoints"):
                    message = f"training.init_from = {name}: {error}"
                    error_at = FieldError(("training", "init_from"), message)
                    raise SpecError([self._sweep.locate(error_at, cell.levels)]) from None
                self.absent.append(str(error))
                identity = {"absent": init_from}
            self._checkpoints[init_from] = CheckpointWeights(name, init_from, identity)
        return self._checkpoints[init_from]


def find_missing_source(trial: "Trial", store: Store) -> TrainedWeights | None:
    """Return the training that a trial has to train from and that is not done; None if none is."""
    source = trial.source_training
    if source is None or store.is_trained(trial.training_id):
        return None
    return None if store.is_trained(source.training_id) else source


def explain_missing_source(source: TrainedWeights, store: Store) -> str:
    """Return why a training that another one starts from has no weights, and what to do."""
    message = store.divergence(source.training_id)
    reason = f"diverged: {message}" if message else "has no weights: its trials failed or are gone"
    text = f"its weights start from training {source.training_id} ({source.name}), which {reason}"
    return f"{text}; repair that one, then submit with --retry-failed"
