"""Quality of one model: loss, probes and HellaSwag, one-shot and through the serving cache."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kvlab.data import load_hellaswag, load_tokenizer
from kvlab.evaluate.associative_recall import make_recall_rows, recall_measurements, score_recall
from kvlab.evaluate.forward_passes import OnTokens
from kvlab.evaluate.hellaswag_prompts import CONVENTIONS
from kvlab.evaluate.hellaswag_scoring import hellaswag_measurements, score_hellaswag
from kvlab.evaluate.kv_precision import compare_kv_precision, stores_other_dtype
from kvlab.evaluate.validation_loss import (
    Tokens,
    bits_per_byte,
    one_shot_window_losses,
    position_losses,
    position_measurements,
    served_window_losses,
)
from kvlab.model import GPT
from kvlab.model.kernels import keep_freed_memory
from kvlab.spec import ServingConfig
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
    """``measurements`` by the names of `kvlab.store.metrics`; ``items`` as `score_hellaswag`
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
    with keep_freed_memory(model.device.type):
        return _evaluate(model, dataset, experiment, on_progress)


def _evaluate(
    model: GPT, dataset: ValidationText, experiment: Experiment, on_progress: OnProgress | None
) -> Evaluation:
    measurements = _measure_losses(model, dataset, experiment, on_progress)

    def progress(note: str, tokens: int) -> Callable[[int], None]:
        return _ProgressReporter(note, tokens, on_progress).advance

    measurements |= measure_probes(model, dataset.validation, experiment, progress)
    items = _score_hellaswag_items(model, experiment, on_progress)
    if items:
        measurements |= hellaswag_measurements(items)
    return Evaluation(measurements, items)


def _measure_losses(
    model: GPT, dataset: ValidationText, experiment: Experiment, on_progress: OnProgress | None
) -> dict[str, float | int]:
    wanted = experiment.evaluation
    served_tokens = (wanted.served_tokens or wanted.loss_tokens) if wanted.served else 0
    block, start = model.config.block_size, experiment.data.document_start
    loss_windows, served_windows = -(-wanted.loss_tokens // block), -(-served_tokens // block)
    scored = max(loss_windows, served_windows) * block
    progress = _ProgressReporter("validation loss", scored, on_progress)
    one_shot = one_shot_window_losses(model, dataset.validation, scored, progress.advance, start)
    loss = float(one_shot[:loss_windows].mean())
    found: dict[str, float | int] = {
        "loss": loss,
        "bits_per_byte": bits_per_byte(loss, dataset.bytes_per_token),
        "loss_tokens": loss_windows * block,
    }
    if not wanted.served:
        return found
    serving, text = experiment.serving, dataset.validation
    coarse = stores_other_dtype(model, serving)
    progress = _ProgressReporter("served loss", (1 + coarse) * served_windows * block, on_progress)
    if coarse:
        both = compare_kv_precision(model, text, served_tokens, serving, progress.advance, start)
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


def _score_hellaswag_items(
    model: GPT, experiment: Experiment, on_progress: OnProgress | None
) -> list[dict[str, Any]]:
    wanted = experiment.evaluation
    if wanted.hellaswag_items == 0:
        return []
    items = load_hellaswag(wanted.hellaswag_items)
    endings = sum(len(item.endings) for item in items)
    ways = 2 if wanted.served else 1
    progress = _ProgressReporter("HellaSwag", endings * len(CONVENTIONS) * ways, on_progress)
    return score_hellaswag(
        model,
        items,
        load_tokenizer(experiment.data.tokenizer),
        experiment.serving if wanted.served else None,
        progress.advance,
    )


class _ProgressReporter:
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


# The probes of one model, one-shot and through the serving cache.


WINDOW_MULTIPLE = 2
"""Where positions allow it, loss by position reads windows of this many trained lengths."""

StartProgress = Callable[[str, int], OnTokens]
"""From a note for a person and the number of tokens to come, what counts them."""


def measure_probes(
    model: GPT, validation: Tokens, experiment: Experiment, progress: StartProgress
) -> dict[str, float | int]:
    """Measures the probes that ``experiment.evaluation`` asks for.

    Raises:
        DataError: too few validation tokens.
    """
    wanted = experiment.evaluation
    ways: list[tuple[str, ServingConfig | None]] = [("", None)]
    if wanted.served:
        ways.append(("_served", experiment.serving))
    found: dict[str, float | int] = {}
    if wanted.recall:
        block = model.config.block_size
        rows = make_recall_rows(wanted.recall, block, experiment.data.vocab_size - 1)
        tick = progress("associative recall", rows.tokens.size * len(ways))
        found |= {"recall_rows": wanted.recall, "recall_pairs": rows.pairs}
        for ending, serving in ways:
            found |= recall_measurements(rows, score_recall(model, rows, serving, tick), ending)
    if wanted.positions:
        found |= _measure_position_losses(model, validation, experiment, ways, progress)
    return found


def position_loss_windows(experiment: Experiment) -> tuple[int, int]:
    """Validation tokens of the loss by position, and the length of its windows."""
    model, wanted = experiment.model, experiment.evaluation
    tokens = (wanted.served and wanted.served_tokens) or wanted.loss_tokens
    # learned positions end with the trained length
    return tokens, model.block_size * (
        1 if model.position_scheme.has_embedding else WINDOW_MULTIPLE
    )


def _measure_position_losses(
    model: GPT,
    validation: Tokens,
    experiment: Experiment,
    ways: list[tuple[str, ServingConfig | None]],
    progress: StartProgress,
) -> dict[str, float]:
    block = model.config.block_size
    tokens, length = position_loss_windows(experiment)
    tick = progress("loss by position", -(-tokens // length) * length * len(ways))
    found: dict[str, float] = {}
    for ending, serving in ways:
        losses = position_losses(model, validation, tokens, length, serving, tick)
        found |= position_measurements(losses, block, ending)
    return found
