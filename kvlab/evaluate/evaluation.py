"""Quality of one model: loss, probes and HellaSwag, one-shot and through the serving cache."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kvlab.data import hellaswag, tokenizer
from kvlab.evaluate.hellaswag import hellaswag_measurements, score_hellaswag
from kvlab.evaluate.loss import Tokens, bits_per_byte, served_window_losses, window_losses
from kvlab.evaluate.probes import probe
from kvlab.evaluate.questions import CONVENTIONS
from kvlab.evaluate.storage import compare_storage, is_coarse
from kvlab.heap import freed_memory_kept
from kvlab.model import GPT
from kvlab.spec.experiment import Experiment

REPORT_SECONDS = 0.5

OnProgress = Callable[[dict[str, Any]], None]


class ValidationText(Protocol):
    """What the losses need of a dataset."""

    @property
    def validation(self) -> Tokens:
        """Token ids, (tokens,)."""

    @property
    def bytes_per_token(self) -> float:
        """Validation text bytes per validation token."""


@dataclass(frozen=True)
class Evaluation:
    """``measurements`` by the names of `kvlab.trial.metrics`; ``items`` as `score_hellaswag`
    gives them."""

    measurements: dict[str, float | int]
    items: list[dict[str, Any]] = field(default_factory=list)


def evaluate(
    model: GPT,
    dataset: ValidationText,
    experiment: Experiment,
    *,
    device: str | torch.device = "cpu",
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Measures what ``experiment.evaluation`` asks for.

    The served loss is over the first ``served_tokens`` validation tokens, the one-shot loss over
    the first ``loss_tokens``; the serving gap compares both on the served ones. Both counts are
    rounded up to whole windows of ``block_size``.

    Args:
        on_progress: gets ``stage, note, step, steps``, at most about twice a second. What it
            raises ends the evaluation.

    Raises:
        DataError: too few validation tokens, or HellaSwag or a tokenizer cannot be had.
    """
    model = model.to(device).eval()
    with freed_memory_kept(model.device.type):
        return _evaluate(model, dataset, experiment, on_progress)


def _evaluate(
    model: GPT, dataset: ValidationText, experiment: Experiment, on_progress: OnProgress | None
) -> Evaluation:
    measurements = _losses(model, dataset, experiment, on_progress)

    def progress(note: str, tokens: int) -> Callable[[int], None]:
        return _Progress(note, tokens, on_progress).advance

    measurements |= probe(model, dataset.validation, experiment, progress)
    items = _hellaswag(model, experiment, on_progress)
    if items:
        measurements |= hellaswag_measurements(items)
    return Evaluation(measurements, items)


def _losses(
    model: GPT, dataset: ValidationText, experiment: Experiment, on_progress: OnProgress | None
) -> dict[str, float | int]:
    wanted = experiment.evaluation
    served_tokens = (wanted.served_tokens or wanted.loss_tokens) if wanted.served else 0
    block, start = model.config.block_size, experiment.data.document_start
    loss_windows, served_windows = -(-wanted.loss_tokens // block), -(-served_tokens // block)
    scored = max(loss_windows, served_windows) * block
    progress = _Progress("validation loss", scored, on_progress)
    one_shot = window_losses(model, dataset.validation, scored, progress.advance, start)
    loss = float(one_shot[:loss_windows].mean())
    found: dict[str, float | int] = {
        "loss": loss,
        "bits_per_byte": bits_per_byte(loss, dataset.bytes_per_token),
        "loss_tokens": loss_windows * block,
    }
    if not wanted.served:
        return found
    serving, text = experiment.serving, dataset.validation
    coarse = is_coarse(model, serving)
    progress = _Progress("served loss", (1 + coarse) * served_windows * block, on_progress)
    if coarse:
        both = compare_storage(model, text, served_tokens, serving, progress.advance, start)
        windows, found = both.served, found | both.measurements
    else:
        windows = served_window_losses(model, text, served_tokens, serving, progress.advance, start)
    served = float(windows.mean())
    return found | {
        "loss_served": served,
        "bits_per_byte_served": bits_per_byte(served, dataset.bytes_per_token),
        "served_tokens": served_windows * block,
        "serving_gap": served - float(one_shot[:served_windows].mean()),
    }


def _hellaswag(
    model: GPT, experiment: Experiment, on_progress: OnProgress | None
) -> list[dict[str, Any]]:
    wanted = experiment.evaluation
    if wanted.hellaswag_items == 0:
        return []
    items = hellaswag(wanted.hellaswag_items)
    endings = sum(len(item.endings) for item in items)
    ways = 2 if wanted.served else 1
    progress = _Progress("HellaSwag", endings * len(CONVENTIONS) * ways, on_progress)
    return score_hellaswag(
        model,
        items,
        tokenizer(experiment.data.tokenizer),
        experiment.serving if wanted.served else None,
        progress.advance,
    )


class _Progress:
    """Counts what is done of one part, and passes it on now and then."""

    def __init__(self, note: str, steps: int, listener: OnProgress | None):
        self._note, self._steps, self._listener = note, steps, listener
        self._done, self._told = 0, float("-inf")

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if self._listener is not None and now - self._told >= REPORT_SECONDS:
            self._told = now
            state = {"stage": "evaluation", "note": self._note}
            self._listener({**state, "step": self._done, "steps": self._steps})
