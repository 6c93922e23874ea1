"""Train a trial from what it starts from: a checkpoint, another training, a shared stable phase."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvlab.data.shards import Dataset
from kvlab.errors import SourceDamaged, SourceMissing, StoreError
from kvlab.fs.lease import Fence
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.model import GPT
from kvlab.model.gpt import check_parameter_count
from kvlab.model.uptraining import initialize_from
from kvlab.spec.checkpoint_tools import find_checkpoint_tool
from kvlab.store import Store
from kvlab.store.attempt import ProgressUpdate
from kvlab.train.checkpoint import Trunk
from kvlab.train.loop import train
from kvlab.train.tensor_files import read_final_weights
from kvlab.trial.code_identity import this_code
from kvlab.trial.initial_weights import CheckpointWeights, InitialWeights
from kvlab.trial.trial import Trial

_RECORD_FILE = "start.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InitialWeightsLoader:
    """Load the initial weights of one training.

    Args:
        weights: where they come from.
        directory: of the training; that of a source training lies beside it.
        report: receives how many parameters were loaded.
        fence: of the lock on ``directory``.
    """

    weights: InitialWeights
    directory: Path
    report: Callable[[ProgressUpdate], None]
    fence: Fence | None = None

    @property
    def identity(self) -> Any:
        return self.weights.identity

    def load(self, model: GPT) -> None:
        """Copy, pool and average what fits into ``model``; the rest keeps its own values.

        What became of each parameter is written to ``start.json``.

        Raises:
            SourceMissing: the source has changed since the sweep was planned, or none of its
                weights fits.
            SourceDamaged: the weights of the source are not what was written, or are gone.
            PretrainedError: the checkpoint is gone or cannot be read.
        """
        weights, name = self.weights, self.weights.name
        if isinstance(weights, CheckpointWeights):
            if find_checkpoint_tool("identify")(weights.location) != weights.identity:
                text = f"training.init_from = {name}: its files are not those planned with"
                raise SourceMissing(f"{text}; submit again to plan with these")
            source = GPT.from_pretrained(weights.location)
            tensors = {name: parameter.detach() for name, parameter in source.named_parameters()}
            conversion = initialize_from(model, source.config, tensors)
        else:
            try:
                trained = read_final_weights(self.directory.parent / weights.training_id)
            except StoreError as error:
                raise SourceDamaged(f"training.init_from = {name}: {error}") from None
            conversion = initialize_from(model, weights.trial.experiment.model, trained)
        if not (conversion.copied or conversion.pooled or conversion.averaged):
            reasons = ", ".join(sorted(set(conversion.fresh.values()))[:3])
            text = f"training.init_from = {name}: none of its weights fits ({reasons})"
            raise SourceMissing(f"{text}; start from a model of the same n_embd")
        for parameter, reason in conversion.fresh.items():
            _log.warning("%s keeps its own initial values: %s", parameter, reason)
        for key, values in conversion.changed.items():
            _log.warning("%s of the model is %s as in %s", key, values, name)
        for parameter in conversion.unused:
            _log.warning("%s of %s is not used", parameter, name)
        counts = ", ".join(f"{len(names)} {part}" for part, names in asdict(conversion).items())
        self.report({"stage": "initial weights", "note": f"of {name}: {counts}"})
        facts = {"source": name, "identity": self.identity, **asdict(conversion)}
        write_sealed_json(self.directory / _RECORD_FILE, facts, fence=self.fence)


def train_trial(
    trial: Trial,
    dataset: Dataset,
    directory: Path,
    device: str,
    report: Callable[[ProgressUpdate], None],
    should_stop: Callable[[], bool],
    fence: Fence,
) -> None:
    """Train a trial on one device into ``directory``, a training's folder in a store.

    It starts from the trial's initial weights, or branches from the stable phase that it shares.
    """
    weights = trial.initial_weights
    loader = None if weights is None else InitialWeightsLoader(weights, directory, report, fence)
    trunk: Trunk | None = None
    if trial.trunk_id is not None:
        store = Store(directory.parent.parent)
        trunk = Trunk(store.trunk_directory(trial.trunk_id), frozenset(trial.shared_steps))
    source = trial.source_training
    begun_by = Store(directory.parent.parent).training_code(source.training_id) if source else []
    model = GPT(trial.experiment.model, seed=trial.seed)
    check_parameter_count(model)
    train(
        model.to(device),
        dataset,
        trial.experiment,
        seed=trial.seed,
        directory=directory,
        device=device,
        on_progress=report,
        should_stop=should_stop,
        initial_weights=loader,
        until=trial.until,
        trunk=trunk,
        code=[*begun_by, this_code().training],
        fence=fence,
    )


def read_initialization_record(directory: Path) -> dict[str, Any] | None:
    """Return what `InitialWeightsLoader.load` wrote; None if the weights were freshly drawn."""
    path = directory / _RECORD_FILE
    record: dict[str, Any] | None = read_sealed_json(path) if path.exists() else None
    return record
