"""The contract of a trial's two stages. The real ones are in `kvlab.trial.stages`."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvlab.trial.progress import Update
from kvlab.trial.result import Measured
from kvlab.trial.trial import Trial

ReportProgress = Callable[[Update], None]


class Stages(Protocol):
    """The work of one trial, after its directories are locked."""

    def train(self, directory: Path, should_stop: Callable[[], bool]) -> None:
        """Trains into ``directory``, from its last checkpoint on; writes training.json last.

        Raises:
            Stopped: ``should_stop()`` became true; a checkpoint is written.
            Paused: the trial's ``until`` is reached; a checkpoint and rungs.json are written.
            Diverged: the loss is no number any more.
        """
        ...

    def measure(self, directory: Path) -> Measured:
        """Loads the weights of ``directory`` and measures them as the experiment says."""
        ...


MakeStages = Callable[[Trial, ReportProgress], Stages]
