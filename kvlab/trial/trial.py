"""A trial: a cell with a seed, and the two ids that name its weights and its result."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.spec.experiment import Experiment
from kvlab.trial.fingerprint import fingerprint, training_identity, trial_identity

ID_LENGTH = 16
"""Hex digits of a fingerprint that make an id: 64 bits."""


@dataclass(frozen=True)
class Trial:
    """What one worker runs. Plain data, picklable.

    Attributes:
        id: first digits of the trial fingerprint; names the result.
        training_id: first digits of the training fingerprint; names the weights.
        experiment: the complete configuration.
        seed: of the initial weights and the batches.
        data_identity: digest of the text, as it was when the trial was planned.
    """

    id: str
    training_id: str
    experiment: Experiment
    seed: int
    data_identity: str

    @classmethod
    def of(cls, experiment: Experiment, data_identity: str, seed: int) -> "Trial":
        return cls.at_seeds(experiment, data_identity, (seed,))[0]

    @classmethod
    def at_seeds(
        cls, experiment: Experiment, data_identity: str, seeds: Sequence[int]
    ) -> "list[Trial]":
        """The trials of one cell: what they have in common is looked at once."""
        weights = training_identity(experiment, data_identity, 0)
        result = trial_identity(experiment, "")
        trials = []
        for seed in seeds:
            training = fingerprint({**weights, "seed": seed})
            whole = fingerprint({**result, "training": training})
            ids = whole[:ID_LENGTH], training[:ID_LENGTH]
            trials.append(cls(*ids, experiment, seed, data_identity))
        return trials
