"""Log-likelihoods of continuations, as EleutherAI's lm-eval harness asks for them.

Contexts that several continuations share, as the choices of one question do, are computed once;
see `kvlab.evaluate.scoring`.
"""

from collections.abc import Callable, Sequence

from kvlab.evaluate.questions import Branches
from kvlab.evaluate.score import Score
from kvlab.evaluate.scoring import ending_scores
from kvlab.heap import freed_memory_kept
from kvlab.model import GPT
from kvlab.spec.parts import ServingConfig

Pair = tuple[list[int], list[int]]
"""Ids of a context and of its continuation, neither empty."""


def pair_scores(
    model: GPT,
    pairs: Sequence[Pair],
    serving: ServingConfig | None = None,
    tick: Callable[[int], None] = lambda _: None,
) -> list[Score]:
    """Each continuation after its context; what exceeds the model is cut from the left.

    Args:
        serving: token by token through this cache; None: one-shot.
        tick: called now and then with the number of continuations that are newly done.
    """
    places: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    for number, pair in enumerate(pairs):
        context, ending = _fitted(pair, model.config.block_size)
        places.setdefault(tuple(context), []).append((number, ending))
    branches = [
        Branches(list(context), [ending for _, ending in endings])
        for context, endings in places.items()
    ]
    found: dict[int, Score] = {}
    with freed_memory_kept(model.device.type):
        scored = ending_scores(model, branches, serving, tick)
    for endings, scores in zip(places.values(), scored, strict=True):
        found.update((number, score) for (number, _), score in zip(endings, scores, strict=True))
    return [found[number] for number in range(len(pairs))]


def _fitted(pair: Pair, block_size: int) -> Pair:
    """The last ``block_size + 1`` tokens of both: the last one is predicted, never fed."""
    context, ending = pair
    kept = (context + ending)[-(block_size + 1) :]
    scored = min(len(ending), len(kept) - 1)
    return kept[:-scored], kept[-scored:]
