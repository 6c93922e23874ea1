"""Slots that keep some tokens of the context and drop the others (`serving.evict`)."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvlab.layout.slot_plan import Term, TokenSlot
from kvlab.spec.serving_config import SCORE_BYTES, VOTE_BYTES, EvictionRule


@dataclass(frozen=True, kw_only=True)
class EvictingSlot(TokenSlot):
    """A slot of layers without a window. If ``rule`` drops nothing of a context, all tokens stay.

    Attributes:
        rule: which tokens are kept.
    """

    rule: EvictionRule = field(kw_only=True)
    drops_tokens: ClassVar[bool] = True

    def count_entries(self, context: int) -> int:
        return self.rule.count_entries(context) if self.rule.drops(context) else context

    def count_seen(self, context: int) -> int:
        return self.rule.count_held(context) if self.rule.drops(context) else context

    def count_dropped(self, context: int) -> int:
        return self.rule.count_dropped(context)

    def growth_bytes(self, dtype: str) -> int:  # noqa: ARG002
        return 0

    def keeps_all_tokens(self, context: int) -> bool:
        return not self.rule.drops(context)

    def count_units(self, start: int, end: int, context: int) -> int:
        return 0 if self.rule.drops(context) else end - start

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "evict": self.rule.identity()}

    def open(self, rows: int, context: int, dtype: Any, device: Any) -> Any:
        if self.rule.drops(context):
            return super().open(rows, context, dtype, device)
        return TokenSlot(self.layer, self.kv_dtype, self.kv_group).open(
            rows, context, dtype, device
        )


@dataclass(frozen=True, kw_only=True)
class RecencySlot(EvictingSlot):
    """The first tokens of a text and the newest: a ring with sinks (arXiv 2309.17453)."""

    @property
    def window(self) -> int:
        return self.rule.recent

    @property
    def sinks(self) -> int:
        return self.rule.sinks

    def snapshot_bytes(self, length: int, context: int, dtype: str) -> int:
        if not self.rule.drops(context):
            return 0
        return super().snapshot_bytes(length, context, dtype)

    def formula(self, slots: str, context: int, dtype: str) -> list[Term]:
        [(held, token)] = super().formula(slots, context, dtype)
        return [(f"{held} kept" if self.rule.drops(context) else held, token)]


@dataclass(frozen=True, kw_only=True)
class HeavyHitterSlot(EvictingSlot):
    """The newest tokens, and those that all queries attended to most, for each K/V head by itself
    (H2O, arXiv 2306.14048)."""

    buffer: ClassVar[str] = "kvlab.cache.eviction:HeavyHitterBuffer"

    @property
    def token_score_bytes(self) -> int:
        """Bytes of a token that is kept, for all heads: its score and its position."""
        return self.layer.stored[0].count * SCORE_BYTES

    def stored_bytes(self, context: int, dtype: str) -> int:
        scores = self.rule.keep * self.token_score_bytes if self.rule.drops(context) else 0
        return super().stored_bytes(context, dtype) + scores

    def snapshot_bytes(self, length: int, context: int, dtype: str) -> int:
        if not self.rule.drops(context):
            return 0
        return self.rule.count_held(length) * (self.token_bytes(dtype) + self.token_score_bytes)

    def formula(self, slots: str, context: int, dtype: str) -> list[Term]:
        [(held, token)] = super().formula(slots, context, dtype)
        if not self.rule.drops(context):
            return [(held, token)]
        scores = f"{self.layer.stored[0].count} heads x {SCORE_BYTES} bytes of scores"
        return [(f"{held} kept", f"({token} + {scores})")]


@dataclass(frozen=True, kw_only=True)
class PromptSlot(EvictingSlot):
    """A prompt is reduced at its end, by the attention of its last queries, for each K/V head by
    itself. Later tokens all stay (SnapKV, arXiv 2404.14469)."""

    buffer: ClassVar[str] = "kvlab.cache.eviction:PromptBuffer"

    @property
    def voted_tokens(self) -> int:
        """Tokens of the prompt that its last ones vote for."""
        assert self.rule.prompt is not None, "a prompt is reduced"
        return self.rule.prompt - self.rule.recent

    @property
    def vote_bytes(self) -> int:
        return self.layer.stored[0].count * self.voted_tokens * VOTE_BYTES

    def growth_bytes(self, dtype: str) -> int:
        return self.token_bytes(dtype)

    def stored_bytes(self, context: int, dtype: str) -> int:
        votes = self.vote_bytes if self.rule.drops(context) else 0
        return super().stored_bytes(context, dtype) + votes

    def read_bytes(self, context: int, dtype: str) -> int:
        """Return the bytes of the tokens: nobody reads the votes once the prompt is reduced."""
        return self.count_seen(context) * self.token_bytes(dtype)

    def snapshot_bytes(self, length: int, context: int, dtype: str) -> int:
        if not self.rule.drops(context):
            return 0
        votes = self.vote_bytes if self.rule.is_voting(length) else 0
        return self.rule.count_held(length) * self.token_bytes(dtype) + votes

    def formula(self, slots: str, context: int, dtype: str) -> list[Term]:
        terms = super().formula(slots, context, dtype)
        if self.rule.drops(context):
            heads = f"{slots} x {self.layer.stored[0].count} heads"
            terms.append((heads, f"{self.voted_tokens} tokens x {VOTE_BYTES} bytes of votes"))
        return terms
