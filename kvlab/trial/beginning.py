"""First weights from a checkpoint or another training, put into a model. Imports torch."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kvlab.errors import SourceMissing
from kvlab.files import read_json, write_json
from kvlab.model import GPT
from kvlab.model.convert import Conversion, start_from
from kvlab.spec.model import ModelConfig
from kvlab.train import final_weights
from kvlab.trial.progress import Update
from kvlab.trial.start import CheckpointStart, Start, checkpoint_identity

FILE = "start.json"
_log = logging.getLogger(__name__)


class Beginning:
    """The first weights of one training.

    Args:
        start: where they come from.
        directory: of the training; the source's stands beside it. `apply` writes there what
            became of each parameter, into ``start.json``.
        report: gets how many parameters came over.
    """

    def __init__(self, start: Start, directory: Path, report: Callable[[Update], None]):
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
        conversion = start_from(model, config, weights)
        if not (conversion.copied or conversion.pooled or conversion.averaged):
            reasons = ", ".join(sorted(set(conversion.fresh.values()))[:3])
            text = f"training.init_from = {self._start.name}: none of its weights fits ({reasons})"
            raise SourceMissing(f"{text}; start from a model of the same n_embd")
        _log_misfits(self._start.name, conversion)
        self._report({"stage": "first weights", "note": _summary(self._start.name, conversion)})
        facts = {"source": self._start.name, "identity": self.identity}
        write_json(self._directory / FILE, {**facts, **conversion.as_dict()})

    def _source(self) -> tuple[ModelConfig, Mapping[str, Tensor]]:
        start = self._start
        if isinstance(start, CheckpointStart):
            if checkpoint_identity(start.place) != start.identity:
                text = f"training.init_from = {start.name}: its files are not those planned with"
                raise SourceMissing(f"{text}; submit again to plan with these")
            model = GPT.from_pretrained(start.place)
            return model.config, {name: p.detach() for name, p in model.named_parameters()}
        return start.model, final_weights(self._directory.parent / start.training_id)


def _summary(name: str, conversion: Conversion) -> str:
    counts = {part: len(names) for part, names in conversion.as_dict().items()}
    return f"of {name}: " + ", ".join(f"{count} {part}" for part, count in counts.items())


def _log_misfits(name: str, conversion: Conversion) -> None:
    """Every parameter that did not come over whole, one line each."""
    for parameter, reason in conversion.fresh.items():
        _log.warning("%s keeps its own first values: %s", parameter, reason)
    for parameter in conversion.unused:
        _log.warning("%s of %s found no place", parameter, name)


def read_beginning(directory: Path) -> dict[str, Any] | None:
    """What `Beginning.apply` wrote, None if the first weights were freshly drawn."""
    try:
        found: dict[str, Any] = read_json(directory / FILE)
    except FileNotFoundError:
        return None
    return found
