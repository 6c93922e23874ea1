"""First weights from a checkpoint or another training, put into a model. Imports torch."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kvlab.errors import SourceMissing
from kvlab.fs.atomic_files import read_json, write_json
from kvlab.model import GPT
from kvlab.model.uptraining import Conversion, initialize_from
from kvlab.spec.model_config import ModelConfig
from kvlab.store.progress import ProgressUpdate
from kvlab.train import read_final_weights
from kvlab.trial.initial_weights import CheckpointWeights, InitialWeights, checkpoint_identity

RECORD_FILE = "start.json"
_log = logging.getLogger(__name__)


class InitialWeightsLoader:
    """The first weights of one training.

    Args:
        start: where they come from.
        directory: of the training; the source's stands beside it. `apply` writes there what
            became of each parameter, into ``start.json``.
        report: gets how many parameters came over.
    """

    def __init__(
        self, start: InitialWeights, directory: Path, report: Callable[[ProgressUpdate], None]
    ):
        self._start, self._directory, self._report = start, directory, report

    @property
    def identity(self) -> Any:
        return self._start.identity

    def apply(self, model: GPT) -> None:
        """Copies, pools and averages what fits; the rest keeps its own first values.

        Raises:
            SourceMissing: the source has changed since it was planned, or nothing of it fits.
            PretrainedError: the checkpoint is gone or cannot be read.
            StoreError: the source training's weights are damaged.
        """
        config, weights = self._source()
        conversion = initialize_from(model, config, weights)
        if not (conversion.copied or conversion.pooled or conversion.averaged):
            reasons = ", ".join(sorted(set(conversion.fresh.values()))[:3])
            text = f"training.init_from = {self._start.name}: none of its weights fits ({reasons})"
            raise SourceMissing(f"{text}; start from a model of the same n_embd")
        _log_incompatibilities(self._start.name, conversion)
        self._report({"stage": "first weights", "note": _summarize(self._start.name, conversion)})
        facts = {"source": self._start.name, "identity": self.identity}
        write_json(self._directory / RECORD_FILE, {**facts, **conversion.as_dict()})

    def _source(self) -> tuple[ModelConfig, Mapping[str, Tensor]]:
        start = self._start
        if isinstance(start, CheckpointWeights):
            if checkpoint_identity(start.place) != start.identity:
                text = f"training.init_from = {start.name}: its files are not those planned with"
                raise SourceMissing(f"{text}; submit again to plan with these")
            model = GPT.from_pretrained(start.place)
            return model.config, {name: p.detach() for name, p in model.named_parameters()}
        return start.model, read_final_weights(self._directory.parent / start.training_id)


def _summarize(name: str, conversion: Conversion) -> str:
    counts = {part: len(names) for part, names in conversion.as_dict().items()}
    return f"of {name}: " + ", ".join(f"{count} {part}" for part, count in counts.items())


def _log_incompatibilities(name: str, conversion: Conversion) -> None:
    """Every parameter that did not come over whole, one line each."""
    for parameter, reason in conversion.fresh.items():
        _log.warning("%s keeps its own first values: %s", parameter, reason)
    for parameter in conversion.unused:
        _log.warning("%s of %s found no place", parameter, name)


def read_initialization_record(directory: Path) -> dict[str, Any] | None:
    """What `Beginning.apply` wrote, None if the first weights were freshly drawn."""
    try:
        found: dict[str, Any] = read_json(directory / RECORD_FILE)
    except FileNotFoundError:
        return None
    return found
