"""Policies that rank tokens as they are attended to: `serving.evict.by`. No torch."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvlab.spec.members import Member


class RankingStep(NamedTuple):
    """What a policy may rank tokens by: one query of each row, and the tokens it sees.

    Shapes: B rows, H K/V heads, G query heads of each, N tokens, D width of a head. Tokens that are
    not there or not kept are among the N. How many there are depends on how a text is split into
    passes; scores must not. A policy may change none of these tensors.

    Attributes:
        attention: (B, H, G, N), what the query takes of each token; 0 of those that it does not
            see. With ``model.sink: learned`` they sum to less than 1.
        queries: (B, H, G, D).
        keys: (B, H, N, D), as they are attended to.
        values: (B, H, N, D).
        positions: (B, H, N), of the tokens in the text.
        position: (B, 1, 1), of the query.
        is_kept: (B, H, N), of bool: the tokens that the query sees, its own included.
    """

    attention: Any
    queries: Any
    keys: Any
    values: Any
    positions: Any
    position: Any
    is_kept: Any


class EvictionPolicy(Member, ABC):
    """Which token is dropped when a newer one needs its place: the one of the lowest score.

    Each K/V head drops tokens by itself. The first ``sinks`` and the newest ``recent`` tokens stay
    whatever their score is; of equal scores the oldest goes. With ``serving.evict.prompt`` nothing
    is dropped before a prompt ends. Its last ``recent`` tokens rank the others, then those of the
    lowest scores go at once, of equal ones the newest; later tokens stay.
    """

    own_names = ("recency", "heavy_hitters", "snapkv")

    @property
    def checked_servings(self) -> tuple[dict[str, Any], ...]:
        kept = {"keep": 9, "by": self, "sinks": 1, "recent": 2}
        return {"evict": kept}, {"evict": {**kept, "prompt": 13, "pool": 3}}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Refuse a `rank` that changes what it is given, or scores a kept token with NaN."""
        rank, name = self.rank, type(self).__name__

        def checked(scores: Any, step: RankingStep) -> Any:
            given = [one.clone() for one in step]
            ranked = rank(scores, step)
            for field, old, new in zip(step._fields, given, step, strict=True):
                assert old.equal(new), f"{name}.rank changes step.{field}; work on a copy"
            if hasattr(ranked, "isnan") and ranked.shape == scores.shape:
                has_nan = ranked[step.is_kept].isnan().any()
                assert not has_nan, f"{name}.rank returns NaN for a token that is kept"
            return ranked

        self.__dict__["rank"] = checked
        try:
            yield
        finally:
            del self.__dict__["rank"]

    @abstractmethod
    def rank(self, scores: Any, step: RankingStep) -> Any:
        """Return the scores (B, H, N) after a token has attended to those that are kept.

        Args:
            scores: (B, H, N) of float32, as the step before has returned them; 0 of the newest
                token, and of the last ``recent`` ones of a prompt. They may be overwritten.
        """


class HeavyHitters(EvictionPolicy):
    """The attention that a token has received, of all query heads (H2O, arXiv 2306.14048)."""

    name = "heavy_hitters"

    def rank(self, scores: Any, step: RankingStep) -> Any:
        return scores + step.attention.sum(2).float()
