"""Slots that keep some tokens of the context and drop the others, and which layers have them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvlab.extensions.eviction.config import (
    PROMPT_SCORE_BYTES,
    SCORE_BYTES,
    EvictFields,
    EvictionRule,
)
from kvlab.layout import KVLayout
from kvlab.layout.slot_plan import Term, TokenSlot
from kvlab.spec.dtypes import MODEL_DTYPE
from kvlab.spec.layer_config import LayerConfig
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.serving_config import ServingConfig
from kvlab.spec.spec_model import Problems


@dataclass(frozen=True, kw_only=True)
class EvictingSlot(TokenSlot):
    """A slot of layers without a window, which keeps ``rule.keep`` tokens of any context.

    A context from which nothing is dropped is stored as in a slot of all tokens.

    Attributes:
        of_all: what ``rule`` is of, if slots differ by depth.
    """

    rule: EvictionRule
    of_all: EvictionRule | None = None

    def of_place(self, place: int, places: int) -> "EvictingSlot":
        rule = self.rule.of_place(place, places)
        return self if rule is self.rule else replace(self, rule=rule, of_all=self.rule)

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
        """Return how many tokens the queries of a text do not see though they would in training,
        over all its queries."""
        dropped = max(0, context - self.rule.keep)
        return dropped * (dropped + 1) // 2

    def measure_texts(self, lengths: Sequence[int]) -> dict[str, float]:
        queries = sum(length * (length + 1) // 2 for length in lengths)
        return {"evicted_share": sum(map(self.count_dropped, lengths)) / queries}

    def growth_bytes(self, dtype: str) -> int:  # noqa: ARG002
        return 0

    def keeps_all_tokens(self, context: int) -> bool:
        return not self.drops(context)

    def count_units(self, start: int, end: int, context: int) -> int:
        return 0 if self.drops(context) else end - start

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "evict": (self.of_all or self.rule).identity()}

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
class RankedSlot(EvictingSlot):
    """The newest tokens, and those of the highest score by a policy, for each K/V head by itself;
    by default those that all queries attended to most (H2O, arXiv 2306.14048)."""

    buffer: ClassVar[str] = "kvlab.extensions.eviction.buffers:RankedBuffer"

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
    """A prompt is reduced at its end, by the scores that its last queries give the others, for each
    K/V head by itself. Later tokens all stay (SnapKV, arXiv 2404.14469)."""

    buffer: ClassVar[str] = "kvlab.extensions.eviction.buffers:PromptBuffer"

    @property
    def prompt(self) -> int:
        """Tokens that are reduced to ``rule.keep``."""
        assert self.rule.prompt is not None, "a prompt is reduced"
        return self.rule.prompt

    @property
    def ranked_tokens(self) -> int:
        """Tokens of the prompt that its last ones rank."""
        return self.prompt - self.rule.recent

    @property
    def score_bytes(self) -> int:
        return self.layer.stored[0].count * self.ranked_tokens * PROMPT_SCORE_BYTES

    def drops(self, context: int) -> bool:
        return self.rule.keep < self.prompt < context

    def count_held(self, tokens: int) -> int:
        return tokens if tokens < self.prompt else self.rule.keep + tokens - self.prompt

    def is_ranking(self, tokens: int) -> bool:
        """Return whether some of its last tokens have ranked the others, but not all."""
        return self.ranked_tokens < tokens < self.prompt

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
        scores = self.score_bytes if self.drops(context) else 0
        return super().stored_bytes(context, dtype) + scores

    def read_bytes(self, context: int, dtype: str) -> int:
        """Return the bytes of the tokens: nobody reads the scores once the prompt is reduced."""
        return self.count_seen(context) * self.token_bytes(dtype)

    def snapshot_bytes(self, length: int, context: int, dtype: str) -> int:
        if not self.drops(context):
            return 0
        scores = self.score_bytes if self.is_ranking(length) else 0
        return self.count_held(length) * self.token_bytes(dtype) + scores

    def formula(self, slots: str, context: int, dtype: str) -> list[Term]:
        terms = super().formula(slots, context, dtype)
        if self.drops(context):
            heads = f"{slots} x {self.layer.stored[0].count} heads"
            terms.append(
                (heads, f"{self.ranked_tokens} tokens x {PROMPT_SCORE_BYTES} bytes of scores")
            )
        return terms


def plan_slot(layer: LayerConfig, model: ModelConfig, serving: ServingConfig) -> TokenSlot | None:
    """Return the slot of a global layer under `serving.evict`."""
    rule = resolve_rule(model, serving)
    if rule is None or layer.window is not None:
        return None
    kv = serving.kv
    stored = layer, kv.dtype, kv.resolve_group(model), kv.rotate
    if rule.prompt is not None:
        return PromptSlot(*stored, rule=rule)
    return (RankedSlot if rule.is_scored else RecencySlot)(*stored, rule=rule)


def resolve_rule(model: ModelConfig, serving: ServingConfig) -> EvictionRule | None:
    """Return which tokens global slots keep; None for all."""
    evict = EvictFields.of(serving).evict
    if evict is None:
        return None
    return evict.resolve(evict.keep or _find_kept_tokens(model, serving))


def fix_budget(model: ModelConfig, serving: ServingConfig) -> dict[str, Any]:
    """Return the fields of ``serving`` that keep as many tokens in any dtype."""
    evict, rule = EvictFields.of(serving).evict, resolve_rule(model, serving)
    if evict is None or rule is None:
        return {}
    return {"evict": evict.model_copy(update={"keep": rule.keep, "bytes": None})}


def find_problems(model: ModelConfig, serving: ServingConfig) -> Problems:
    """Yield why tokens of ``model`` cannot be evicted, by fields of a spec."""
    evict = EvictFields.of(serving).evict
    if evict is None:
        return
    layout = _lay_out_all_tokens(model, serving)
    is_global = [layer.stores_tokens and layer.window is None for layer in model.layers]
    shared = [slot for slot in layout.owners if is_global[slot] and layout.owners.count(slot) > 1]
    if not any(is_global):
        text = "has no layer to act on: all have a window, whose ring drops tokens by itself"
        if not all(layer.stores_tokens for layer in model.layers):
            text = "has no layer to act on: none stores all tokens"
        yield "serving.evict", f"{text}; leave it out, or use a pattern with G"
    elif not isinstance(layout.plans[is_global.index(True)], TokenSlot):
        text = f"cannot drop single tokens from the blocks of kv_dtype {serving.kv_dtype}"
        yield "serving.evict", f"{text}; use int4, int8 or fp8, or leave one out"
    elif evict.prompt is not None and evict.prompt >= model.block_size:
        text = f"leaves no token of block_size = {model.block_size} to decode after it"
        yield "serving.evict.prompt", f"{text}; use less"
    elif evict.by != "recency" and not model.kv_form.stores_keys:
        text = "ranks tokens by stored keys, so it needs model.kv: separate"
        yield "serving.evict.by", f"{text}; use recency"
    elif evict.by != "recency" and shared:
        text = f"would differ between the layers that share the slot of layer {shared[0]}"
        yield "serving.evict.by", f"{text}; use recency, or share no K/V"
    else:
        problems = []
        if evict.bytes is not None:
            problems = [*evict.find_budget_problems(_find_kept_tokens(model, serving))]
        if evict.top_share not in (None, 1.0) and not problems:
            problems = [*_find_share_problems(model, serving)]
        yield from ((f"serving.evict.{name}", message) for name, message in problems)


def _find_share_problems(model: ModelConfig, serving: ServingConfig) -> Problems:
    """Yield why layers cannot keep as many tokens as ``top_share`` gives them."""
    evict, layout = EvictFields.of(serving).evict, KVLayout.of(model, serving)
    assert evict is not None
    plans = [layout.plans[slot] for slot in layout.slots]
    found = {plan.layer.kind: plan.rule for plan in plans if isinstance(plan, EvictingSlot)}
    kept = [plan.rule.keep for plan in plans if isinstance(plan, EvictingSlot)]
    always = min(rule.count_always_kept() for rule in found.values())
    limit = evict.prompt or model.block_size
    taken = layout.stored_bytes(1, model.block_size, MODEL_DTYPE)
    if len(found) > 1 or len(kept) == 1:
        yield "top_share", "needs several slots of global layers, all of one kind; leave it out"
    elif min(kept) <= always:
        text = f"lets a layer keep {min(kept)} tokens, with no place beside the {always} that stay"
        yield "top_share", f"{text}; bring it nearer to 1, or keep more"
    elif max(kept) > limit:
        text = f"lets a layer keep {max(kept)} of {limit} tokens"
        yield "top_share", f"{text}; bring it nearer to 1, or keep less"
    elif evict.bytes is not None and taken > evict.bytes:
        text = f"makes the cache of bytes = {evict.bytes:,} take {taken:,}"
        yield "top_share", f"{text}; bring it nearer to 1, or give keep"


def _lay_out_all_tokens(model: ModelConfig, serving: ServingConfig) -> KVLayout:
    return KVLayout.of(model, serving.model_copy(update={"evict": None}))


def _find_kept_tokens(model: ModelConfig, serving: ServingConfig) -> int:
    """Return how many tokens global slots may keep in a budget of bytes, possibly none.

    The budget is of the cache of one sequence of ``block_size`` tokens in a trial's dtype.
    """
    evict = EvictFields.of(serving).evict
    assert evict is not None
    assert evict.bytes is not None
    layout, rings, tokens, scores = _lay_out_all_tokens(model, serving), 0, 0, 0
    for plan in (layout.plans[slot] for slot in layout.slots):
        if plan.layer.stores_tokens and plan.layer.window is None:
            tokens += plan.token_bytes(MODEL_DTYPE)
            scores += plan.layer.stored[0].count * evict.resolve(1).slot_score_bytes
        else:
            rings += plan.stored_bytes(model.block_size, MODEL_DTYPE)
    spare = max(0, evict.bytes - rings)
    if spare >= model.block_size * tokens:
        return model.block_size  # nothing is dropped, so nothing is scored
    if evict.prompt is not None:
        held = max(0, spare - scores) // tokens
        return max(0, held - model.block_size + evict.prompt) if held >= evict.prompt else 0
    return spare // (tokens + scores)
