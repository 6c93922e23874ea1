"""The first weights of every cell and seed, resolved while a sweep is planned. No torch."""

from collections.abc import Callable, Sequence
from pathlib import Path

from kvlab.errors import PretrainedError, SpecError
from kvlab.spec.init_from import INIT_FROM_FIELD, cell_key, source_cell_levels
from kvlab.spec.sweep import Cell, Sweep
from kvlab.store import Store
from kvlab.trial.fingerprint import training_fingerprint
from kvlab.trial.initial_weights import (
    CheckpointWeights,
    InitialWeights,
    TrainedWeights,
    checkpoint_identity,
)
from kvlab.trial.trial import Trial

TrialOf = Callable[[Cell, int], Trial]


class InitFromResolver:
    """Resolves ``training.init_from``, each checkpoint once.

    Args:
        sweep: its cells are where other trainings are looked up.
        provisional: a repository that is not on this machine is noted in ``absent``, and not
            downloaded.
    """

    def __init__(self, sweep: Sweep, cells: Sequence[Cell], *, provisional: bool):
        self._sweep, self._provisional = sweep, provisional
        self._cells = {cell_key(cell.levels): cell for cell in cells}
        self._checkpoints: dict[str, CheckpointWeights] = {}
        self.absent: list[str] = []

    def of(self, cell: Cell, seed: int, trial_of: TrialOf) -> InitialWeights | None:
        """Where this cell's first weights come from at this seed.

        Raises:
            SpecError: a checkpoint cannot be had.
        """
        written, levels = cell.experiment.training.init_from, source_cell_levels(cell)
        if (
            isinstance(written, dict) and levels is not None
        ):  # `kvlab.spec.init_from` has checked that it leads somewhere
            source = self._cells[cell_key(levels)]
            trial = trial_of(source, seed)
            whole = training_fingerprint(trial.experiment, trial.data_identity, seed, trial.start)
            # what was written, not the whole cell: trials that share a training then say the same
            named = " ".join(f"{factor}={levels[factor]}" for factor in sorted(written))
            return TrainedWeights(f"{named}, seed {seed}", whole, source.experiment.model)
        if not isinstance(written, str):
            return None
        if written not in self._checkpoints:
            self._checkpoints[written] = self._checkpoint(written, cell)
        return self._checkpoints[written]

    def _checkpoint(self, place: str, cell: Cell) -> CheckpointWeights:
        is_path = Path(place).is_absolute()
        name = Path(place).name if is_path else place
        try:
            identity = checkpoint_identity(place, download=not self._provisional)
        except PretrainedError as error:
            if not self._provisional or is_path:
                message = f"training.init_from = {name}: {error}"
                raise SpecError(
                    [self._sweep.place((INIT_FROM_FIELD, message, False), cell.levels)]
                ) from None
            self.absent.append(str(error))
            identity = {"absent": place}
        return CheckpointWeights(name, place, identity)


def needs_source(trial: Trial, store: Store) -> bool:
    """Whether a trial must train, and what it starts from is not trained."""
    source, done = trial.source, store.training_done
    return source is not None and not done(trial.training_id) and not done(source.training_id)
