"""A trial: a cell with a seed, and the two ids that name its weights and its result."""

from dataclasses import dataclass

from kvlab.spec.experiment import Experiment
from kvlab.trial.fingerprint import fingerprint, training_fingerprint, trial_identity
from kvlab.trial.initial_weights import ID_LENGTH, InitialWeights, TrainedWeights


@dataclass(frozen=True)
class Trial:
    """What one worker runs. Plain data, picklable.

    Attributes:
        id: first digits of the trial fingerprint; names the result.
        training_id: first digits of the training fingerprint; names the weights.
        experiment: the complete configuration.
        seed: of the initial weights and the batches.
        data_identity: digest of the text, as it was when the trial was planned.
        start: where the first weights come from; None if they are freshly drawn.
        until: the step after which the training pauses, as a search asks; None trains to the
            end. Like resources, it is no part of what is computed.
    """

    id: str
    training_id: str
    experiment: Experiment
    seed: int
    data_identity: str
    start: InitialWeights | None = None
    until: int | None = None

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        data_identity: str,
        seed: int,
        start: InitialWeights | None = None,
    ) -> "Trial":
        unresolved = experiment.training.init_from is not None and start is None
        assert not unresolved, "init_from is resolved before there is a trial"
        training = training_fingerprint(experiment, data_identity, seed, start)
        whole = fingerprint(trial_identity(experiment, training))
        ids = whole[:ID_LENGTH], training[:ID_LENGTH]
        return cls(*ids, experiment, seed, data_identity, start)

    @property
    def source(self) -> TrainedWeights | None:
        """The training that must be done before this one can start, if there is one."""
        return self.start if isinstance(self.start, TrainedWeights) else None
