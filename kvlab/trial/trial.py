"""A trial: one cell of a sweep at one seed, and the two ids that name its weights and result."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.layout import parameter_count, training_flops
from kvlab.spec import ResourcesConfig
from kvlab.spec.dtypes import MODEL_DTYPE
from kvlab.spec.experiment import Experiment
from kvlab.store import Store
from kvlab.store.provenance import Origin, build_provenance
from kvlab.store.record_forms import EndStatus
from kvlab.store.result import Failure, TrialMeasurements, describe_experiment, describe_kv
from kvlab.trial import fingerprint as fingerprints
from kvlab.trial.code_identity import this_code
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
        is_measurement: whether it is the second task of a trial that several workers train: one
            of them measures. Set by the driver. Not part of the fingerprints.
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
    is_measurement: bool = False

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
        """What this task of the trial needs."""
        asked = self.experiment.resources
        return asked.one_worker if self.is_measurement else asked

    @property
    def source_training(self) -> TrainedWeights | None:
        """The training that must be done before this one starts; None if there is none."""
        weights = self.initial_weights
        return weights if isinstance(weights, TrainedWeights) else None


def build_result(
    trial: Trial,
    status: EndStatus,
    provenance: dict[str, Any],
    *,
    measured: TrialMeasurements | None = None,
    failure: Failure | None = None,
    pruned: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the contents of `result.json`.

    Args:
        provenance: see `kvlab.store.provenance.build_provenance`.
        measured: of a ``done`` trial.
        failure: of a ``failed`` or ``diverged`` trial.
        pruned: step, steps and loss at which a search stopped a ``pruned`` trial.
    """
    assert (measured is None) == (status != "done"), "exactly the done trials are measured"
    return {
        "trial": trial.id,
        "training": trial.training_id,
        "status": status,
        "seed": trial.seed,
        "experiment": describe_experiment(trial.experiment),
        "kv": describe_kv(trial.experiment, provenance.get("weights", MODEL_DTYPE)),
        "model": {
            "parameters": parameter_count(trial.experiment.model),
            "training_flops": training_flops(trial.experiment),
        },
        "measurements": measured.measurements if measured else {},
        "curves": measured.curves if measured else {"train_loss": [], "validation_loss": []},
        "benchmark": measured.benchmark if measured else [],
        **(measured.lines if measured else {}),
        "training_record": measured.training_record if measured else None,
        "error": failure.as_dict() if failure else None,
        **({"pruned": dict(pruned)} if pruned else {}),
        "provenance": provenance,
    }


def describe_origin(
    trial: Trial, store: Store, origin: Origin, started: str, **measured: Any
) -> dict[str, Any]:
    """Return the ``provenance`` of the result with which this process ends a trial.

    Args:
        started: time of the last attempt's start.
        measured: ``machine`` and ``data``, see `kvlab.store.provenance.build_provenance`.
    """
    training = store.training_code(trial.training_id)
    return build_provenance(
        origin,
        code={"training": training, "measurement": this_code().measurement},
        started=started,
        attempts=max(store.attempts(trial.id), default=0),
        pauses=store.count_pauses(trial.id),
        **measured,
    )


def describe_trial(trial: Trial) -> dict[str, Any]:
    """Return the contents of `trial.json`: what is known of a trial before it runs."""
    return {
        "trial": trial.id,
        "training": trial.training_id,
        **({"trunk": trial.trunk_id} if trial.trunk_id else {}),
        "seed": trial.seed,
        "data_identity": trial.data_identity,
        "experiment": describe_experiment(trial.experiment),
    }
