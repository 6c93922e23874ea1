"""Metrics of users' files, by token: one-shot and through the serving cache.

Shapes: B rows, T tokens, N tokens that are scored, V vocab_size.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvlab.data.batches import Batch, ScoredText, find_targets
from kvlab.evaluate.forward_passes import Arrays, Part, batch_rows, hidden_states, join_arrays
from kvlab.model import GPT
from kvlab.model.loss import iter_logits
from kvlab.spec import ServingConfig
from kvlab.spec.members import MemberError
from kvlab.spec.token_metrics import ScoredTokens, TokenMetric, select_scores


@torch.inference_mode()
def score_tokens(
    model: GPT,
    text: ScoredText,
    metrics: tuple[TokenMetric, ...],
    serving: ServingConfig | None,
    part: Part,
) -> dict[str, float]:
    """Return the mean of each metric over the targets of a text that it counts, by its name.

    Args:
        serving: feed each token alone through this cache. None: one-shot.
        part: advanced by the tokens that are newly read.

    Raises:
        MemberError: a metric gives no finite number for each token, or counts none.
    """

    def compute(batch: Batch) -> Arrays:
        inputs, targets = (torch.from_numpy(tokens).to(model.device) for tokens in batch)
        states = hidden_states(model, inputs, serving, part, text.document_start)
        part.advance(inputs.numel())
        ids = text.target_ids or [range(model.config.vocab_size)]
        is_target = find_targets(targets, ids)
        places, first = is_target.nonzero(), 0
        found: dict[str, list[Any]] = {metric.name: [] for metric in metrics}
        chunks = iter_logits(states[is_target], model.lm_head.weight, targets[is_target])
        for logits, own in chunks:
            last = first + len(own)
            tokens = ScoredTokens(logits, own, inputs, *places[first:last].unbind(1))
            first = last
            for metric in metrics:
                values = metric.score(tokens.clone())
                try:
                    scores = select_scores(values, len(own))
                except ValueError as error:
                    raise MemberError(metric, str(error)) from None
                found[metric.name].append(scores)
        return {name: spread(torch.cat(values), is_target) for name, values in found.items()}

    def spread(values: torch.Tensor, places: torch.Tensor) -> npt.NDArray[Any]:
        windows = torch.full(places.shape, math.nan, dtype=torch.float64, device=places.device)
        windows[places] = values
        return windows.cpu().numpy()

    batches = text.iter_batches(batch_rows(model, text.block_size, serving))
    windows = join_arrays(part.keep(compute, batches))
    flat = {name: text.flatten(values) for name, values in windows.items()}
    scores = {name: values[~np.isnan(values)] for name, values in flat.items()}
    for metric in metrics:
        if not len(scores[metric.name]):
            problem = f"counts none of the {text.target_count:,} tokens of the text"
            hint = "set larger loss_tokens and served_tokens in evaluation"
            raise MemberError(metric, f"{problem}; {hint}")
    return {name: float(values.mean()) for name, values in scores.items()}
