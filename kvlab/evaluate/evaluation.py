"""Evaluate one model, one-shot and through the serving cache."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any, Protocol

import numpy as np
import torch

from kvlab.data.batches import (
    ScoredText,
    Tokens,
    spread_documents,
    spread_indices,
    spread_windows,
    take_documents,
)
from kvlab.data.hellaswag_dataset import load_hellaswag
from kvlab.data.requirements import position_loss_windows
from kvlab.data.shards import Dataset
from kvlab.data.tokenizers import load_tokenizer
from kvlab.errors import MeasurementError
from kvlab.evaluate import validation_loss as losses
from kvlab.evaluate.forward_passes import Arrays, Batch, Part
from kvlab.evaluate.hellaswag import CONVENTIONS, hellaswag_measurements, score_hellaswag
from kvlab.evaluate.token_metrics import score_tokens
from kvlab.model import GPT
from kvlab.model.kernels.malloc import keep_freed_memory
from kvlab.own_extensions import load_parts
from kvlab.spec import ServingConfig
from kvlab.spec.experiment import Experiment

REPORT_SECONDS = 0.5

OnProgress = Callable[[dict[str, Any]], None]


class Kept(Protocol):
    """The results of batches by name, some of them of an earlier attempt."""

    def get(self, name: str, /) -> Arrays | None: ...

    def __setitem__(self, name: str, arrays: Arrays, /) -> None: ...


StartPart = Callable[[str, int], Part]
"""Announce a part by its note and total count."""

Measurements = dict[str, float | int]
"""Values by the names of `kvlab.store.metrics`."""

TextSums = dict[str, dict[str, list[float]]]
"""Losses by document, see `kvlab.store.Store.texts`."""


@dataclass(frozen=True)
class Evaluation:
    """Quality of one model.

    Attributes:
        measurements: by the names of `kvlab.store.metrics`.
        items: HellaSwag records, see `score_hellaswag`.
        lines: those of extensions, by their key in `result.json`.
        details: objects by name: ``texts``, losses by document, see `kvlab.store.Store.texts`, and
            those of extensions.
    """

    measurements: Measurements
    items: list[dict[str, Any]] = field(default_factory=list)
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)


def evaluate(
    model: GPT,
    dataset: Dataset,
    experiment: Experiment,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    on_progress: OnProgress | None = None,
    kept: Kept | None = None,
) -> Evaluation:
    """Measure what ``experiment.evaluation`` asks for.

    The one-shot loss is over ``loss_tokens``, the served loss over ``served_tokens``, both rounded
    up to whole windows of ``block_size`` that are spread evenly over the held-out text; or both
    are over whole documents of ``loss_bytes``. The serving gap and the divergence compare both on
    the served tokens. One-shot is the forward pass of training: with `training.kv_dtype`, K and V
    are rounded as they were there.

    Args:
        seed: says which part of the text is scored, see `select_held_out`.
        on_progress: gets ``stage, note, step, steps``, at most about twice per second. An
            exception that it raises ends the evaluation.
        kept: the batches that are done; those that it has are not computed again.

    Raises:
        DataError: there are too few validation tokens, or HellaSwag or a tokenizer is
            unavailable.
    """
    model = model.to(device).eval()
    model.trained_kv = experiment.training.kv
    validation, config = select_held_out(dataset, experiment, seed), experiment.evaluation

    def start_part(note: str, total: int) -> EvaluationPart:
        return EvaluationPart(note, total, on_progress, kept)

    with keep_freed_memory(model.device.type):
        measurements, texts = _measure_losses(model, validation, experiment, start_part)
        measurements |= measure_positions(model, validation, experiment, start_part)
        items: list[dict[str, Any]] = []
        if config.hellaswag_items != 0:
            questions = load_hellaswag(config.hellaswag_items)
            if config.text_parts is not None:
                questions = questions[seed :: config.text_parts]
            serving = experiment.serving if config.served else None
            total = sum(len(item.endings) for item in questions) * len(CONVENTIONS)
            part = start_part("HellaSwag", total * (2 if config.served else 1))
            tokenizer = load_tokenizer(experiment.data.tokenizer)
            items = score_hellaswag(model, questions, tokenizer, serving, part)
            measurements |= hellaswag_measurements(items)
        evaluation = Evaluation(measurements, items, details={"texts": texts})
        for found in measure_extensions(model, validation, experiment, start_part):
            evaluation.measurements.update(found.measurements)
            evaluation.lines.update(found.lines)
            evaluation.details.update(found.details)
        own = _measure_token_metrics(model, validation, experiment, start_part)
        if taken := evaluation.measurements.keys() & own.keys():
            raise MeasurementError(f"{', '.join(taken)} is measured by kvlab itself; rename it")
        evaluation.measurements.update(own)
    return evaluation


def _measure_losses(
    model: GPT, validation: Tokens, experiment: Experiment, start_part: StartPart
) -> tuple[Measurements, TextSums]:
    serving, data = experiment.serving, experiment.data
    token_bytes = load_tokenizer(data.tokenizer).token_bytes()
    has_bytes = data.vocab_size == len(token_bytes)  # else some targets are symbols beside text
    text, served_text = select_scored_text(validation, experiment)
    measurements: Measurements = {}
    texts: TextSums = {}
    if served_text is not None:
        passes = 2 if losses.stores_other_dtype(model, serving) else 1
        part = start_part("validation loss, served", passes * served_text.token_count)
        compared = losses.compare_serving(model, served_text, serving, part)
        served, one_shot = compared.served, compared.one_shot
        nats = served_text.flatten(served)
        loss = float(nats.mean())
        measurements = {
            "loss_served": loss,
            "served_tokens": served_text.target_count,
            "serving_gap": loss - float(served_text.flatten(one_shot).mean()),
            # with documents masked, a position in the window is not the number of tokens seen
            **compared.measurements(with_parts=text.document_start is None),
        }
        if has_bytes:
            bits = losses.bits_per_byte(nats, served_text.targets(), token_bytes)
            measurements["bits_per_byte_served"] = bits
        measurements |= divide_losses(served_text, nats, experiment, "_served")
        if len(compared.exact):
            exact_loss = float(served_text.flatten(compared.exact).mean())
            measurements["kv_dtype_loss_change"] = loss - exact_loss
        sums = {"nats": served, "one_shot_nats": one_shot}
        texts["served"] = sum_by_document(served_text, experiment, sums)
    if served_text is None or len(text) != len(served_text):
        part = start_part("validation loss", text.token_count)
        one_shot = losses.target_losses(model, text, None, part)
    texts["loss"] = sum_by_document(text, experiment, {"nats": one_shot})
    nats = text.flatten(one_shot)
    measurements |= {"loss": float(nats.mean()), "loss_tokens": text.target_count}
    if has_bytes:
        measurements["bits_per_byte"] = losses.bits_per_byte(nats, text.targets(), token_bytes)
    return measurements | divide_losses(text, nats, experiment, ""), texts


def divide_losses(
    text: ScoredText, nats: losses.Floats, experiment: Experiment, suffix: str
) -> Measurements:
    """Return what extensions measure of the nats of a text's targets.

    The functions of `Parts.losses` have these arguments: a text, the nats of its targets
    (targets,), and the suffix of the metrics of this scoring.
    """
    places = (place for parts in load_parts().values() for place in parts.losses)
    found = (resolve_name(place)(text, nats, experiment, suffix) for place in places)
    return {name: value for one in found for name, value in one.items()}


def _measure_token_metrics(
    model: GPT, validation: Tokens, experiment: Experiment, start_part: StartPart
) -> Measurements:
    """Return the means over the text that is scored served, or if none is, that of the loss."""
    metrics = tuple(experiment.token_metrics)
    if not metrics:
        return {}
    one_shot_text, served_text = select_scored_text(validation, experiment)
    text = one_shot_text if served_text is None else served_text
    scorings = list_scorings(experiment)
    part = start_part("metrics of extensions", text.token_count * len(scorings))
    measurements: Measurements = {}
    for suffix, serving in scorings.items():
        means = score_tokens(model, text, metrics, serving, part)
        measurements |= {f"{name}{suffix}": mean for name, mean in means.items()}
    return measurements


def sum_by_document(
    text: ScoredText, experiment: Experiment, by_name: dict[str, losses.Floats]
) -> dict[str, list[float]]:
    """Return the indices of the scored documents, and the sums of each.

    Args:
        by_name: nats of each target (windows, block_size), by the name of their sum.
    """
    ends = {part.first_id + part.data.vocabulary.end_of_text for part in experiment.data.parts}
    documents = text.find_documents(sorted(ends))
    scored, inverse = np.unique(documents, return_inverse=True)
    sums = {name: np.bincount(inverse, text.flatten(nats)) for name, nats in by_name.items()}
    columns = {"documents": scored, "tokens": np.bincount(inverse), **sums}
    return {name: column.tolist() for name, column in columns.items()}


def select_held_out(dataset: Dataset, experiment: Experiment, seed: int) -> Tokens:
    """Return the held-out text that a seed scores, (tokens,): with ``text_parts`` a part of it.

    Raises:
        DataError: the text has fewer documents than parts.
    """
    parts = experiment.evaluation.text_parts
    if parts is None:
        return dataset.validation
    end_of_text = experiment.data.vocabulary.end_of_text
    return take_documents(dataset.validation, seed, parts, end_of_text)


def select_scored_text(
    validation: Tokens, experiment: Experiment
) -> tuple[ScoredText, ScoredText | None]:
    """Return the windows to score one-shot, and those to score served, None if nothing is.

    Of two numbers of windows the smaller is an even selection of the larger. With ``loss_bytes``
    both are whole documents, the same for every tokenizer and block size.

    Args:
        validation: token ids, (tokens,).

    Raises:
        DataError: there are too few.
    """
    config, block_size = experiment.evaluation, experiment.model.block_size
    data = experiment.data
    rules: dict[str, Any] = {"document_start": data.document_start, "target_ids": data.target_ids}
    if config.loss_bytes is not None:
        tokenizer = load_tokenizer(data.tokenizer)
        text = spread_documents(validation, config.loss_bytes, block_size, tokenizer)
        text = replace(text, **rules)
        return text, text if config.served else None
    counts = [config.loss_tokens]
    if config.served:
        counts.append(config.served_tokens or config.loss_tokens)
    text = replace(spread_windows(validation, max(counts), block_size, data.parts), **rules)
    one_shot, *served = (
        text.select(spread_indices(-(-count // block_size), len(text))) for count in counts
    )
    return one_shot, served[0] if served else None


def list_scorings(experiment: Experiment) -> dict[str, ServingConfig | None]:
    """Return the caches to score through, None for one-shot, by the suffix of their metrics."""
    return {"": None} | ({"_served": experiment.serving} if experiment.evaluation.served else {})


def measure_positions(
    model: GPT, validation: Tokens, experiment: Experiment, start_part: StartPart
) -> Measurements:
    """Measure the loss by position, if ``experiment.evaluation`` asks for it.

    Args:
        validation: token ids, (tokens,).

    Raises:
        DataError: there are too few validation tokens.
    """
    measurements: Measurements = {}
    if experiment.evaluation.positions:
        count, length = position_loss_windows(experiment)
        text, scorings = spread_windows(validation, count, length), list_scorings(experiment)
        part = start_part("loss by position", text.target_count * len(scorings))
        for suffix, serving in scorings.items():
            nats = losses.target_losses(model, text, serving, part).mean(0)
            block_size = model.config.block_size
            measurements |= losses.position_measurements(nats, block_size, suffix)
    return measurements


def measure_extensions(
    model: GPT, validation: Tokens, experiment: Experiment, start_part: StartPart
) -> Iterator[Evaluation]:
    """Yield what extensions measure.

    The functions of `Parts.evaluations` have these arguments and return an `Evaluation`, which is
    empty if the experiment asks for nothing of theirs.

    Args:
        validation: token ids, (tokens,).
    """
    for place in (place for parts in load_parts().values() for place in parts.evaluations):
        yield resolve_name(place)(model, validation, experiment, start_part)


class EvaluationPart(Part):
    """Counts what is done of one part, reports it at most every `REPORT_SECONDS`, and keeps it.

    Args:
        note: names the part.
        total: of its counts.
        on_progress: see `evaluate`.
        kept: see `evaluate`.
    """

    def __init__(self, note: str, total: int, on_progress: OnProgress | None, kept: Kept | None):
        self._note, self._total, self._on_progress, self._kept = note, total, on_progress, kept
        self._done, self._passes, self._reported_at = 0, 0, float("-inf")

    def advance(self, count: int, place: str = "") -> None:
        self._done += count
        now = time.monotonic()
        if self._on_progress is not None and now - self._reported_at >= REPORT_SECONDS:
            self._reported_at = now
            note = f"{self._note}, {place}" if place else self._note
            state = {"stage": "evaluation", "note": note}
            self._on_progress({**state, "step": self._done, "steps": self._total})

    def keep(
        self, compute: Callable[[Batch], Arrays], batches: Iterable[Batch]
    ) -> Iterator[Arrays]:
        if self._kept is None:
            yield from map(compute, batches)
            return
        self._passes += 1
        for number, batch in enumerate(batches):
            name = f"{self._note}, pass {self._passes}, batch {number}"
            arrays = self._kept.get(name)
            if arrays is not None:
                self.advance(int(arrays["count"]))
                yield {key: array for key, array in arrays.items() if key != "count"}
                continue
            before = self._done
            arrays = compute(batch)
            self._kept[name] = {**arrays, "count": np.array(self._done - before)}
            yield arrays
