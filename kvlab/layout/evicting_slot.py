"""Slots that keep some tokens of the context and drop the others (`serving.evict`)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from kvlab.layout.slot_plan import Term, TokenSlot
from kvlab.spec.serving_config import SCORE_BYTES, VOTE_BYTES, EvictionRule


@dataclass(frozen=True, kw_only=True)
class EvictingSlot(TokenSlot):
    """A slot of layers without a window, which keeps ``rule.keep`` tokens of any context.

    A context from which nothing is dropped is stored as in a slot of all tokens.
    """

    rule: EvictionRule
    drops_tokens: ClassVar[bool] = True

    def drops(self, context: int) -> bool:
        """Return whether some tokens of a context are dropped."""
        return context > self.rule.keep

    def count_held(self, tokens: int) -> int:
        """Return how many of the first ``tokens`` of a context that drops some are held."""
        return min(tokens, self.rule.keep)

    def count_entries(self, context: int) -> int:
        return self.count_seen(context)

    def count_seen(self, context: int) -> int:
        return self.count_held(context) if self.drops(context) else context

    def count_dropped(self, context: int) -> int:
        dropped = max(0, context - self.rule.keep)
        return dropped * (dropped + 1) // 2

    def growth_bytes(self, dtype: str) -> int:  # noqa: ARG002
        return 0

    def keeps_all_tokens(self, context: int) -> bool:
        return not self.drops(context)

    def count_units(self, start: int, end: int, context: int) -> int:
        return 0 if self.drops(context) else end - start

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "evict": self.rule.identity()}

    def open(self, rows: int, context: int, dtype: Any, device: Any) -> Any:
        if self.drops(context):
            return super().open(rows, context, dtype, device)
        all_tokens = TokenSlot(self.layer, self.kv_dtype, self.kv_group, self.kv_rotate)
        return all_tokens.open(rows, context, dtype, device)


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
        return super().snapshot_bytes(length, context, dtype) if self.drops(context) else 0

    def formula(self, slots: str, context: int, dtype: str) -> list[Term]:
        [(held, token)] = super().formula(slots, context, dtype)
        return [(f"{held} kept" if self.drops(context) else held, token)]


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
        scores = self.rule.keep * self.token_score_bytes if self.drops(context) else 0
        return super().stored_bytes(context, dtype) + scores

    def snapshot_bytes(self, length: int, context: int, dtype: str) -> int:
        if not self.drops(context):
            return 0
        return self.count_held(length) * (self.token_bytes(dtype) + self.token_score_bytes)

    def formula(self, slots: str, context: int, dtype: str) -> list[Term]:
        [(held, token)] = super().formula(slots, context, dtype)
        if not self.drops(context):
            return [(held, token)]
        scores = f"{self.layer.stored[0].count} heads x {SCORE_BYTES} bytes of scores"
        return [(f"{held} kept", f"({token} + {scores})")]


@dataclass(frozen=True, kw_only=True)
class PromptSlot(EvictingSlot):
    """A prompt is reduced at its end, by the attention of its last queries, for each K/V head by
    itself. Later tokens all stay (SnapKV, arXiv 2404.14469)."""

    buffer: ClassVar[str] = "kvlab.cache.eviction:PromptBuffer"

    @property
    def prompt(self) -> int:
        """Tokens that are reduced to ``rule.keep``."""
        assert self.rule.prompt is not None, "a prompt is reduced"
        return self.rule.prompt

    @property
    def voted_tokens(self) -> int:
        """Tokens of the prompt that its last ones vote for."""
        return self.prompt - self.rule.recent

    @property
    def vote_bytes(self) -> int:
        return self.layer.stored[0].count * self.voted_tokens * VOTE_BYTES

    def drops(self, context: int) -> bool:
        return self.rule.keep < self.prompt < context

    def count_held(self, tokens: int) -> int:
        return tokens if tokens < self.prompt else self.rule.keep + tokens - self.prompt

    def is_voting(self, tokens: int) -> bool:
        """Return whether some votes of the prompt are in, but not all."""
        return self.voted_tokens < tokens < self.prompt

    def count_entries(self, context: int) -> int:
        """Return the most tokens that are held on the way to ``context``: the prompt as a whole."""
        return max(self.count_seen(context), min(context, self.prompt))

    def count_dropped(self, context: int) -> int:
        if not self.drops(context):
            return 0
        return (context - self.prompt) * (self.prompt - self.rule.keep)

    def growth_bytes(self, dtype: str) -> int:
        return self.token_bytes(dtype)

    def stored_bytes(self, context: int, dtype: str) -> int:
        votes = self.vote_bytes if self.drops(context) else 0
        return super().stored_bytes(context, dtype) + votes

    def read_bytes(self, context: int, dtype: str) -> int:
        """Return the bytes of the tokens: nobody reads the votes once the prompt is reduced."""
        return self.count_seen(context) * self.token_bytes(dtype)

    def snapshot_bytes(self, length: int, context: int, dtype: str) -> int:
        if not self.drops(context):
            return 0
        votes = self.vote_bytes if self.is_voting(length) else 0
        return self.count_held(length) * self.token_bytes(dtype) + votes

    def formula(self, slots: str, context: int, dtype: str) -> list[Term]:
        terms = super().formula(slots, context, dtype)
        if self.drops(context):
            heads = f"{slots} x {self.layer.stored[0].count} heads"
            terms.append((heads, f"{self.voted_tokens} tokens x {VOTE_BYTES} bytes of votes"))
        return terms
