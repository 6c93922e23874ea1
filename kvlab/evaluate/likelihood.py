"""Log-likelihoods of continuations, as EleutherAI's lm-eval harness asks for them.

Contexts that several continuations share, as the choices of one question do, are computed once;
see `kvlab.evaluate.scoring`.
"""

from collections.abc import Callable, Sequence

import torch

from kvlab.evaluate.batching import decode_rows, pass_rows
from kvlab.evaluate.loss import served_hidden
from kvlab.evaluate.questions import Branches
from kvlab.evaluate.scoring import ONE_SHOT, Path, ending_losses
from kvlab.model import GPT
from kvlab.spec.parts import ServingConfig

Pair = tuple[list[int], list[int]]
"""Ids of a context and of its continuation, neither empty."""


def log_likelihoods(
    model: GPT,
    pairs: Sequence[Pair],
    serving: ServingConfig | None = None,
    tick: Callable[[int], None] = lambda _: None,
) -> list[float]:
    """Nats of each continuation after its context; what exceeds the model is cut from the left.

    Args:
        serving: token by token through this cache; None: one-shot.
    """
    path = ONE_SHOT if serving is None else Path(serving, token_by_token=True)
    kept = [_fitted(pair, model.config.block_size) for pair in pairs]
    places: dict[tuple[int, ...], list[int]] = {}
    for number, (context, _) in enumerate(kept):
        places.setdefault(tuple(context), []).append(number)
    branches = [
        Branches(list(context), [kept[number][1] for number in numbers])
        for context, numbers in places.items()
    ]
    found = [0.0] * len(pairs)
    losses = ending_losses(model, branches, path, tick)
    for numbers, nats in zip(places.values(), losses, strict=True):
        for number, value in zip(numbers, nats, strict=True):
            found[number] = -value
    return found


@torch.inference_mode()
def are_greedy(
    model: GPT, pairs: Sequence[Pair], serving: ServingConfig | None = None
) -> list[bool]:
    """Whether each continuation is what greedy decoding says, token after token."""
    kept = [_fitted(pair, model.config.block_size) for pair in pairs]
    order = sorted(range(len(kept)), key=lambda i: len(kept[i][0]) + len(kept[i][1]))
    found = [False] * len(kept)
    start = 0
    while start < len(order):
        # sorted: of rows from here on, the shortest decides how many fit, the rest is padding
        length = max(1, len(kept[order[start]][0]) + len(kept[order[start]][1]) - 1)
        rows = pass_rows(model, length)
        if serving is not None:
            rows = min(rows, decode_rows(model, length, serving))
        part = order[start : start + rows]
        start += len(part)
        for number, is_greedy in zip(part, _greedy(model, [kept[i] for i in part], serving),
                                     strict=True):  # fmt: skip
            found[number] = is_greedy
    return found


def _greedy(model: GPT, pairs: Sequence[Pair], serving: ServingConfig | None) -> list[bool]:
    rows = [context + ending[:-1] for context, ending in pairs]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)  # padding at the end is inert
    tokens = tokens.to(model.device)
    if serving is None:
        hidden = model.hidden(tokens)
    else:
        hidden = served_hidden(model, tokens, serving, lambda _: None)
    answers = []
    for i, (context, ending) in enumerate(pairs):
        states = hidden[i, len(context) - 1 : len(context) - 1 + len(ending)]
        answers.append(model.head(states).argmax(-1).tolist() == ending)
    return answers


def _fitted(pair: Pair, block_size: int) -> Pair:
    """The last ``block_size + 1`` tokens of both: the last one is predicted, never fed."""
    context, ending = pair
    kept = (context + ending)[-(block_size + 1) :]
    scored = min(len(ending), len(kept) - 1)
    return kept[:-scored], kept[-scored:]
