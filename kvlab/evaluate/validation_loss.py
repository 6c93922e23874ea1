"""Validation loss by window and by position, one-shot and through the serving cache.

`compare_serving` says what serving changes: the loss, the distribution of the next token, and what
the dtype costs. The same windows are scored one-shot and token by token through the serving cache.
Two means of the loss may agree while the predictions differ, so the distributions are compared as
well, at every token: by the Kullback-Leibler divergence KL(one-shot || served), and by whether the
likeliest token is another. That is how quantized models are compared with their originals (Dutta
et al., arXiv 2407.09141).

Where the cache stores K and V in another dtype than the model's, the windows are decoded once more,
through a cache that differs from the serving cache only in dtype. The cost of tying is therefore
not in what is measured of the dtype.

Shapes: B rows, T tokens of a window, W windows, N tokens, E n_embd, V vocab_size.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlab.data.batches import ScoredText, Tokens
from kvlab.evaluate.forward_passes import (
    SILENT,
    Arrays,
    Part,
    batch_rows,
    document_spans,
    hidden_states,
    join_arrays,
)
from kvlab.layout import KVLayout
from kvlab.layout.training_memory import LOSS_CHUNK_TOKENS
from kvlab.model import GPT
from kvlab.model.loss import token_losses
from kvlab.spec import ServingConfig

Floats = npt.NDArray[np.float64]

POSITION_PARTS = 8


@torch.inference_mode()
def target_losses(
    model: GPT, text: ScoredText, serving: ServingConfig | None, part: Part = SILENT
) -> Floats:
    """Return the nats of each target (windows, block_size), in float64.

    Args:
        serving: feed each token alone through this cache. None: one-shot.
    """

    def compute(batch: tuple[Tokens, Tokens]) -> Arrays:
        inputs, targets = (torch.from_numpy(tokens).to(model.device) for tokens in batch)
        states = hidden_states(model, inputs, serving, part, text.document_start)
        losses = token_losses(states, model.lm_head.weight, targets).double()
        part.advance(inputs.numel())
        return {"nats": _to_numpy(losses)}

    batches = text.iter_batches(batch_rows(model, text.block_size, serving))
    return join_arrays(part.keep(compute, batches))["nats"]


def position_measurements(losses: Floats, block_size: int, suffix: str) -> dict[str, float]:
    """Return means by the names of `kvlab.store.metrics`.

    They are over eight equal parts of the trained length, in order, and over all positions
    beyond it if there are any. A mean over positions hides where a window or a trained length ends.

    Args:
        losses: nats of the token that follows each position, (positions,).
    """
    parts = np.array_split(losses[:block_size], POSITION_PARTS)
    means = {f"loss_part{i + 1}{suffix}": float(p.mean()) for i, p in enumerate(parts) if len(p)}
    beyond = losses[block_size:]
    return means | ({f"loss_beyond{suffix}": float(beyond.mean())} if len(beyond) else {})


def bits_per_byte(losses: Floats, targets: Tokens, token_bytes: npt.NDArray[np.int64]) -> float:
    """Return bits per byte of the scored text, which compare across tokenizers.

    End-of-text tokens cost bits and have no bytes.

    Args:
        losses: nats of each target, any shape.
        targets: their token ids, of the same shape.
        token_bytes: bytes of each token, (vocab_size,).
    """
    return float(losses.sum() / math.log(2) / max(1, token_bytes[targets].sum()))


# What serving changes


_LARGEST_EXPONENT = 30.0
"""A logit that serving raises by more nats than this is summed in logarithms instead."""


@dataclass(frozen=True)
class ServingComparison:
    """The serving cache beside one-shot scoring, over the same windows.

    Attributes:
        one_shot: nats of each target, one-shot, (W, T).
        served: the same through the serving cache.
        exact: the same with its K and V in the model's dtype; empty where they have it anyway.
        by_window: KL(one-shot || served) in nats per token, and the share of positions whose
            likeliest token differs, (2, W).
        by_position: the same as means over windows, (2, T).
        logit_rms: root mean square of what the dtype changes in the logits.
        logit_largest: the largest such change.
        of_slots: what the slots report of the texts, see `SlotPlan.measure_texts`.
    """

    one_shot: Floats
    served: Floats
    exact: Floats
    by_window: Floats
    by_position: Floats
    logit_rms: float
    logit_largest: float
    of_slots: Mapping[str, float]

    def measurements(self, *, with_parts: bool = True) -> dict[str, float]:
        """Return what is measured by the names of `kvlab.store.metrics`.

        Standard errors are over windows, since the tokens of a window depend on each other.

        Args:
            with_parts: with the means over eight equal parts of a window.
        """
        measured: dict[str, float] = {}
        names = "serving_kl", "serving_top_changed"
        for name, by_window, by_place in zip(names, self.by_window, self.by_position, strict=True):
            measured[name] = float(by_window.mean())
            if len(by_window) > 1:
                measured[f"{name}_stderr"] = float(by_window.std(ddof=1) / len(by_window) ** 0.5)
            parts = np.array_split(by_place, POSITION_PARTS) if with_parts else []
            measured |= {
                f"{name}_part{i + 1}": float(p.mean()) for i, p in enumerate(parts) if len(p)
            }
        if len(self.exact):
            measured["kv_dtype_logit_rms"] = self.logit_rms
            measured["kv_dtype_logit_largest"] = self.logit_largest
        return measured | dict(self.of_slots)


def stores_other_dtype(model: GPT, serving: ServingConfig) -> bool:
    """Return whether the cache stores K and V in another dtype than the model's."""
    storage_dtype = KVLayout.of(model.config, serving).storage_dtype(model.dtype_name)
    return storage_dtype != model.dtype_name


@torch.inference_mode()
def compare_serving(
    model: GPT, text: ScoredText, serving: ServingConfig, part: Part = SILENT
) -> ServingComparison:
    """Score validation windows one-shot and through the serving cache.

    Args:
        part: advanced by the tokens that are newly decoded: twice each if `stores_other_dtype`.
    """
    has_other_dtype = stores_other_dtype(model, serving)
    start, exact_serving = text.document_start, serving.store_as_model(model.config)
    # whole one-shot passes side by side, as far as they fit: one-shot scores are then bitwise those
    # of a trial that does not serve
    one_shot_rows, rows = (batch_rows(model, text.block_size, way) for way in (None, exact_serving))
    rows = max(rows // one_shot_rows * one_shot_rows, min(rows, one_shot_rows))

    def compute(batch: tuple[Tokens, Tokens]) -> Arrays:
        inputs, targets = (torch.from_numpy(tokens).to(model.device) for tokens in batch)
        passes = [
            model.hidden_states(some, document_start=start)
            for some in torch.split(inputs, one_shot_rows)
        ]
        states = {
            "served": hidden_states(model, inputs, serving, part, start),
            "one_shot": torch.cat(passes),
        }
        part.advance(inputs.numel())
        divergences = _token_divergences(model, states["one_shot"], states["served"])
        done = {"by_window": divergences.mean(2), "by_position": divergences.sum(1)}
        if has_other_dtype:
            exact = hidden_states(model, inputs, exact_serving, part, start)
            states["exact"] = exact
            changes = []  # sum of squares, largest and number of each chunk
            # the head is linear: the logits of a difference are the differences of the logits
            for chunk in _chunks(states["served"] - exact):
                logits = model.compute_logits(chunk).float()
                square = logits.square().sum(dtype=torch.float64)
                changes.append([float(square), float(logits.abs().max()), logits.numel()])
            done["changes"] = torch.tensor(changes, dtype=torch.float64)
            part.advance(inputs.numel())
        for name, stream in states.items():
            done[name] = token_losses(stream, model.lm_head.weight, targets).double()
        lengths = [end - first for _, first, end in document_spans(inputs, start)]
        done["lengths"] = torch.tensor(lengths)  # of texts that are served alone
        return {name: _to_numpy(values) for name, values in done.items()}

    done = list(part.keep(compute, text.iter_batches(rows)))
    by_position = sum(batch.pop("by_position") for batch in done)
    by_window = np.concatenate([batch.pop("by_window") for batch in done], 1)
    joined = join_arrays(done)
    squares, largest, logit_count = 0.0, 0.0, 0.0
    for square, change, count in joined.pop("changes", np.zeros((0, 3))).tolist():
        squares, largest, logit_count = squares + square, max(largest, change), logit_count + count
    lengths: list[int] = joined.pop("lengths").tolist()
    by_layer = [plan.measure_texts(lengths) for plan in KVLayout.of(model.config, serving).plans]
    of_slots: dict[str, float] = {}
    for name in dict.fromkeys(name for one in by_layer for name in one):
        values = [one[name] for one in by_layer if name in one]
        of_slots[name] = values[0] if len({*values}) == 1 else fmean(values)
    return ServingComparison(
        **{"exact": np.zeros(0), **joined},
        by_window=by_window,
        by_position=by_position / by_window.shape[1],
        logit_rms=(squares / max(1, logit_count)) ** 0.5,
        logit_largest=largest,
        of_slots=of_slots,
    )


def _token_divergences(model: GPT, one_shot: Tensor, served: Tensor) -> Tensor:
    """Return (2, B, T) in float64: KL divergence of every token, and whether the top changed.

    The head is linear, so the logits' differences are the head's product with the difference of
    the residual streams. They are as exact as that difference, where a difference of two logits
    would carry the rounding of both, which exceeds the divergence of a bfloat16 cache.

    Args:
        one_shot, served: residual streams (B, T, E).
    """
    divergences, changes = [], []
    for before, after in zip(_chunks(one_shot), _chunks(served), strict=True):
        logits = model.compute_logits(before)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        change = model.compute_logits(after - before).to(logits.dtype)
        top = logits.max(1).indices[:, None]
        served_logits = logits + change
        # equal logits are no change: there either token may be sampled first
        changes.append(served_logits.amax(1) > served_logits.gather(1, top)[:, 0])
        divergences.append(kl_divergence(logits, change))
    both = torch.stack([torch.cat(divergences), torch.cat(changes).double()])
    return both.view(2, *one_shot.shape[:2])


def kl_divergence(logits: Tensor, change: Tensor) -> Tensor:
    """Return KL(p || q) in nats, with p = softmax(logits) and q = softmax(logits + change).

    With d the change less its mean under p, KL = log E_p[e^d] = log(1 + E_p[e^d - 1 - d]). No term
    of that mean is negative, so small divergences are not lost among the rounding of large
    logarithms, as they are in sum p (log p - log q).

    Args:
        logits: (N, V).
        change: (N, V), in the same dtype; overwritten.

    Returns:
        (N,) in float64.
    """
    probabilities = torch.softmax(logits, -1)
    change -= torch.linalg.vecdot(probabilities, change)[:, None]
    terms = change.clamp_max(_LARGEST_EXPONENT).expm1_().sub_(change)
    divergence: Tensor = torch.linalg.vecdot(probabilities, terms).double().log1p()
    is_large = change.amax(1) > _LARGEST_EXPONENT
    if is_large.any():  # e^d would overflow
        exponents = logits[is_large].log_softmax(-1) + change[is_large]
        divergence[is_large] = exponents.double().logsumexp(-1)
    return divergence


def _chunks(states: Tensor) -> Iterator[Tensor]:
    """Yield residual streams (N, E) of so many tokens that their logits may exist four times."""
    size = LOSS_CHUNK_TOKENS[states.device.type] // 4
    yield from torch.split(states.flatten(0, -2), size)


def _to_numpy(values: Any) -> Floats:
    return np.asarray(values.cpu())
