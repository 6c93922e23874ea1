"""A trial: one cell of a sweep at one seed, and the two ids that name its weights and result."""

from dataclasses import dataclass
from typing import Any

from kvlab.spec import ResourcesConfig
from kvlab.spec.experiment import Experiment
from kvlab.trial import fingerprint as fingerprints
from kvlab.trial.fingerprint import ID_LENGTH, fingerprint
from kvlab.trial.initial_weights import InitialWeights, TrainedWeights


@dataclass(frozen=True)
class Trial:
    """What one worker trains and measures. Plain data, picklable.

    Attributes:
        id: first digits of the trial fingerprint; names the result.
        training_id: first digits of the training fingerprint; names the weights.
        experiment: the complete configuration.
        seed: of the freshly drawn weights and the batches.
        data_identity: digest of the text's tokens when the trial was planned.
        initial_weights: where the training starts from; None for freshly drawn weights.
        until: the step after which the training pauses, set by a search that prunes; None
            trains to the end. Not part of the fingerprints.
        trunk_id: first digits of the fingerprint of the stable phase that trainings of other
            token budgets have in common with this one; None if there is no such phase.
        shared_steps: steps of that phase whose checkpoints other trainings of the plan branch
            from, set by the planner. Not part of the fingerprints.
    """

    id: str
    training_id: str
    experiment: Experiment
    seed: int
    data_identity: str
    initial_weights: InitialWeights | None = None
    until: int | None = None
    trunk_id: str | None = None
    shared_steps: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        data_identity: str,
        seed: int,
        initial_weights: InitialWeights | None = None,
    ) -> "Trial":
        """Return the trial of an experiment, with its ids computed."""
        is_unresolved = experiment.training.init_from is not None and initial_weights is None
        assert not is_unresolved, "init_from is resolved before there is a trial"
        identity = fingerprints.training_identity(experiment, data_identity, seed, initial_weights)
        training = fingerprint(identity)
        trial = fingerprint(fingerprints.trial_identity(experiment, training))
        trunk = fingerprints.trunk_fingerprint(experiment, identity)
        ids = trial[:ID_LENGTH], training[:ID_LENGTH]
        trunk_id = trunk and trunk[:ID_LENGTH]
        return cls(*ids, experiment, seed, data_identity, initial_weights, trunk_id=trunk_id)

    def training_identity(self) -> dict[str, Any]:
        """Return what the final weights depend on, as plain data."""
        return fingerprints.training_identity(
            self.experiment, self.data_identity, self.seed, self.initial_weights
        )

    @property
    def resources(self) -> ResourcesConfig:
        return self.experiment.resources

    @property
    def source_training(self) -> TrainedWeights | None:
        """The training that must be done before this one starts; None if there is none."""
        weights = self.initial_weights
        return weights if isinstance(weights, TrainedWeights) else None
