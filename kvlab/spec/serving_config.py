"""`serving` of an experiment: what changes only inference. Also `serving.evict`."""

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from pydantic import Field

from kvlab.sharing import owner_map, tied_slots
from kvlab.spec.dtypes import (
    MIN_GROUP,
    MODEL_DTYPE,
    KVDtypeField,
    KVStorage,
    list_part_dtypes,
    list_rotations,
    token_bytes,
)
from kvlab.spec.model_config import ModelConfig, SharingField
from kvlab.spec.spec_model import NonNegativeInt, OneOf, PositiveInt, Problems, SpecModel

DEFAULT_SINKS = 4
"""First tokens that `recency` keeps, as StreamingLLM does (arXiv 2309.17453)."""

DEFAULT_OBSERVERS, DEFAULT_POOL = 32, 7
"""Of `snapkv`: its window and its pooling in the experiments of arXiv 2404.14469."""

SCORE_BYTES = 8
"""Of a kept token and head under `heavy_hitters`: its score as a float32, and its position."""

VOTE_BYTES = 4
"""Of a token of the prompt and head under `snapkv`: the attention that it received, a float32."""


@dataclass(frozen=True)
class EvictionRule:
    """Which tokens a slot keeps, resolved.

    Attributes:
        keep: tokens that are kept, the newest included; with ``prompt`` of the prompt alone.
        sinks: the first tokens of a text, which are never dropped.
        recent: the newest tokens, which are never dropped; with ``prompt`` its last ones, whose
            queries vote for the others.
        is_scored: whether the others are ranked by the attention that they received. Otherwise
            ``sinks + recent = keep``, and nothing else is kept.
        prompt: tokens of a text that are reduced to ``keep`` once all of them are stored. Later
            ones are kept. None: a token is dropped whenever a newer one needs its place.
        pool: with ``prompt``, neighbours of which the largest vote counts; else None.
    """

    keep: int
    sinks: int
    recent: int
    is_scored: bool
    prompt: int | None = None
    pool: int | None = None

    @property
    def slot_score_bytes(self) -> int:
        """Bytes that a slot that drops tokens has for each K/V head beside its K and V."""
        if self.prompt is not None:
            return VOTE_BYTES * (self.prompt - self.recent)
        return self.keep * SCORE_BYTES if self.is_scored else 0

    def identity(self) -> dict[str, int | bool]:
        """Return the fields that say what is computed, as plain data."""
        return {key: value for key, value in asdict(self).items() if value is not None}


class EvictConfig(SpecModel):
    """`serving.evict`: global layers keep some tokens of the context and drop the others.

    ``recency`` keeps the first ``sinks`` tokens and the newest (StreamingLLM, arXiv 2309.17453).
    ``heavy_hitters`` keeps the newest ``recent`` tokens, and of the others those that received the
    most attention, for each K/V head by itself (H2O, arXiv 2306.14048). ``snapkv`` reduces the
    first ``prompt`` tokens to ``keep`` at their end, by the attention of the last ``recent`` of
    them, and drops none of the later ones (SnapKV, arXiv 2404.14469). Keys keep the rotation of
    their own position. The budget is ``keep`` tokens or ``bytes`` of one sequence.
    """

    keep: PositiveInt | None = None
    """Tokens that each global layer keeps, the newest included; by snapkv those of the prompt.
    Unit: tokens. Example: 64"""
    bytes: PositiveInt | None = None
    """In place of keep: the most bytes that the cache of one sequence of block_size tokens may
    take, over all layers.
    Unit: bytes. Example: 8388608"""
    by: Literal["recency", "heavy_hitters", "snapkv"] = "recency"
    """Which tokens are kept: the newest, those that received most attention, or those of the prompt
    to which its last tokens attend most.
    Example: heavy_hitters, keep: 64"""
    sinks: NonNegativeInt | None = None
    """First tokens of a text that are always kept.
    Unit: tokens. Default: 4 by recency, else 0. Example: 8, keep: 64"""
    recent: PositiveInt | None = None
    """Newest tokens that heavy_hitters always keeps; of snapkv the last tokens of the prompt, which
    are kept and whose queries vote for the others.
    Unit: tokens. Default: half of the tokens kept; 32 by snapkv. Example: 16, keep: 64, by:
    heavy_hitters"""
    prompt: PositiveInt | None = None
    """First tokens of a text that snapkv reduces to keep, once it has all of them.
    Unit: tokens. Example: 256, keep: 64, by: snapkv"""
    pool: PositiveInt | None = None
    """Neighbouring tokens of which snapkv takes the largest vote, so that it keeps what stands
    beside a token that is attended to; an odd number.
    Unit: tokens. Default: 7 by snapkv. Example: 5, keep: 64, by: snapkv, prompt: 256"""

    def _find_problems(self) -> Problems:
        if (self.keep is None) == (self.bytes is None):
            text = "is missing" if self.keep is None else "and bytes are two budgets"
            yield "keep", f"{text}; give keep or bytes"
        if self.recent is not None and self.by == "recency":
            text = "is read only by: heavy_hitters and snapkv"
            yield "recent", f"{text}; by recency all but sinks are the newest"
        if self.by == "snapkv":
            recent = self.recent or DEFAULT_OBSERVERS
            if self.pool is not None and self.pool % 2 == 0:
                text = "is even, so it has no token in its middle"
                yield "pool", f"{text}; use {self.pool - 1} or {self.pool + 1}"
            if self.prompt is None:
                yield "prompt", "is missing; by snapkv it is the tokens that are reduced to keep"
                return
            if self.prompt <= recent:
                text = f"has no token before its last {recent}, which vote"
                yield "prompt", f"{text}; use more, or set recent"
        else:
            for name in ("prompt", "pool"):
                if getattr(self, name) is not None:
                    yield name, "is read only by: snapkv; leave it out"
        if self.keep is not None:
            yield from self.find_budget_problems(self.keep)

    def find_budget_problems(self, keep: int) -> Problems:
        """Yield why ``keep`` tokens are too few."""
        rule = self.resolve(keep)
        least = rule.sinks + (1 if self.by == "recency" else rule.recent + 1)
        if keep < least:
            recent = "" if self.by == "recency" else f" and recent = {rule.recent}"
            text = f"has no place beside sinks = {rule.sinks}{recent}"
            if self.keep is None:
                text = f"is enough to keep {keep}, which {text}"
            yield "bytes" if self.keep is None else "keep", f"{text}; use more, or lower them"

    def resolve(self, keep: int) -> EvictionRule:
        """Return the rule at a budget of ``keep`` tokens."""
        if self.by == "snapkv":
            observers, pool = self.recent or DEFAULT_OBSERVERS, self.pool or DEFAULT_POOL
            return EvictionRule(keep, self.sinks or 0, observers, True, self.prompt, pool)
        is_scored = self.by == "heavy_hitters"
        default = 0 if is_scored else DEFAULT_SINKS
        sinks = default if self.sinks is None else self.sinks
        recent = (self.recent or max(1, keep // 2)) if is_scored else keep - sinks
        return EvictionRule(keep, sinks, recent, is_scored)


class ServingConfig(SpecModel):
    """`serving`: what changes only inference. It never retrains.

    ``tie`` joins layers on one cache slot though each was trained with its own K/V. With
    ``tie_rule: overwrite`` every layer writes the shared slot and the last one wins, as in the
    code of the Character.AI article; with ``owner`` only the first layer of a group writes.
    """

    omitted_defaults = frozenset({"kv_group", "kv_residual", "kv_rotate", "evict", "compile"})

    kv_dtype: KVDtypeField = "model"
    """How K/V are stored; model keeps the model's dtype. As {k: int8, v: int4} each has its own.
    Example: int8"""
    kv_group: Annotated[PositiveInt, Field(ge=MIN_GROUP)] | None = None
    """Numbers of a head that share a scale, in a kv_dtype with scales. It divides head_dim. In
    kivi4 and kivi2 it is also the tokens of a block of keys.
    Unit: numbers. Default: 32 (at most head_dim) for int4, kivi4 and kivi2, and the whole head for
    int8 and fp8. Example: 16, kv_dtype: int4"""
    kv_residual: NonNegativeInt | None = None
    """Newest tokens that kivi4 and kivi2 store in the model's dtype.
    Unit: tokens. Default: 128 for kivi4 and kivi2. Example: 64, kv_dtype: kivi2"""
    kv_rotate: Annotated[str, OneOf(list_rotations)] = "none"
    """Multiply K and V by an orthonormal matrix of the head before they are stored, so that few
    numbers of a vector are much larger than the others. Scores and values stay the same but for
    rounding, and so do bytes.
    Example: hadamard, kv_dtype: int4"""
    tie: SharingField = "none"
    """Layers that share one cache slot at serving, though each was trained with its own K/V.
    Patterns as in model.kv_sharing.
    Example: 'adjacent:2'"""
    tie_rule: Literal["overwrite", "owner"] = "overwrite"
    """Who writes a tied slot: every layer, so that the last one wins (overwrite), or its first
    layer alone (owner).
    Example: owner, tie: 'adjacent:2'"""

    evict: EvictConfig | None = None
    """Keep a fixed number of tokens in global layers, and drop the others. Example: {keep: 64}"""
    compile: bool = False
    """torch.compile the step that decodes one token, on CUDA before it is captured. Results differ
    in rounding. Each size of batch and cache is compiled anew: for small models in about 20 s on
    one core.
    Example: true"""

    def _find_problems(self) -> Problems:
        yield from self.kv.find_setting_problems()
        by, has_blocks = self.evict.by if self.evict else "recency", self.kv.blocks is not None
        if self.compile and (has_blocks or by != "recency"):
            cause = f"kv_dtype {self.kv_dtype}" if has_blocks else f"evict by {by}"
            text = f"needs steps of fixed shapes, which {cause} does not have"
            yield "compile", f"{text}; leave one of the two out"

    @property
    def kv(self) -> KVStorage:
        """How the cache stores K and V."""
        return KVStorage(self.kv_dtype, self.kv_group, self.kv_residual, self.kv_rotate)

    def find_slots(self, model: ModelConfig) -> tuple[int, ...]:
        """Return for every layer of ``model`` the slot that it reads.

        Raises:
            SharingError: the tie is not possible on these layers.
        """
        tie = owner_map(self.tie, model.layer_kinds)
        return tied_slots(model.kv_owners, tie, self.tie_rule)

    def find_eviction_problems(self, model: ModelConfig) -> Problems:
        """Yield why tokens of ``model`` cannot be evicted, by fields of a spec."""
        if self.evict is None:
            return
        slots = self.find_slots(model)
        is_global = [layer.stores_tokens and layer.window is None for layer in model.layers]
        shared = [slot for slot in slots if is_global[slot] and slots.count(slot) > 1]
        if not any(is_global):
            text = "has no layer to act on: all have a window, whose ring drops tokens by itself"
            if not all(layer.stores_tokens for layer in model.layers):
                text = "has no layer to act on: none stores all tokens"
            yield "serving.evict", f"{text}; leave it out, or use a pattern with G"
        elif self.kv.blocks is not None:
            text = f"cannot drop single tokens from the blocks of kv_dtype {self.kv_dtype}"
            yield "serving.evict", f"{text}; use int4, int8 or fp8, or leave one out"
        elif self.evict.prompt is not None and self.evict.prompt >= model.block_size:
            text = f"leaves no token of block_size = {model.block_size} to decode after it"
            yield "serving.evict.prompt", f"{text}; use less"
        elif self.evict.by != "recency" and not model.kv_form.stores_keys:
            text = "ranks tokens by stored keys, so it needs model.kv: separate"
            yield "serving.evict.by", f"{text}; use recency"
        elif self.evict.by != "recency" and shared:
            text = f"would differ between the layers that share the slot of layer {shared[0]}"
            yield "serving.evict.by", f"{text}; use recency, or share no K/V"
        elif self.evict.bytes is not None:
            keep = self._find_kept_tokens(model)
            problems = self.evict.find_budget_problems(keep)
            yield from ((f"serving.evict.{name}", message) for name, message in problems)

    def find_state_problems(self, model: ModelConfig) -> Problems:
        """Yield what does not go with layers that store a state, by fields of a spec."""
        if message := model.describe_shared_state(self.find_slots(model)):
            yield "serving.tie", message
        if self.compile and not all(layer.stores_tokens for layer in model.layers):
            text = "runs a step several times before it counts, which would change a layer's state"
            yield "serving.compile", f"{text}; leave it out, or use a pattern of G and L alone"

    def resolve_eviction(self, model: ModelConfig) -> EvictionRule | None:
        """Return which tokens global slots keep; None for all."""
        if self.evict is None:
            return None
        return self.evict.resolve(self.evict.keep or self._find_kept_tokens(model))

    def _find_kept_tokens(self, model: ModelConfig) -> int:
        """Return how many tokens global slots may keep in a budget of bytes, possibly none.

        The budget is of the cache of one sequence of ``block_size`` tokens in a trial's dtype.
        """
        evict = self.evict
        assert evict is not None
        assert evict.bytes is not None
        rings = tokens = scores = 0
        for slot in set(self.find_slots(model)):
            layer = model.layers[slot]
            rings += layer.mixer.state_bytes(layer, MODEL_DTYPE)
            dtypes = list_part_dtypes(self.kv_dtype, len(layer.stored), MODEL_DTYPE)
            token = token_bytes(layer.stored, dtypes, self.kv_group)
            if layer.stores_tokens and layer.window is None:
                tokens += token
                scores += layer.stored[0].count * evict.resolve(1).slot_score_bytes
            else:
                rings += layer.visible_tokens(model.block_size) * token
        spare = max(0, evict.bytes - rings)
        if spare >= model.block_size * tokens:
            return model.block_size  # nothing is dropped, so nothing is scored
        if evict.prompt is not None:
            held = max(0, spare - scores) // tokens
            return max(0, held - model.block_size + evict.prompt) if held >= evict.prompt else 0
        return spare // (tokens + scores)

    def store_as_model(self, model: ModelConfig) -> "ServingConfig":
        """Return the same serving with K and V in the model's dtype, and as many tokens kept."""
        fields = type(self).model_fields
        update = {name: field.default for name, field in fields.items() if name.startswith("kv_")}
        rule = self.resolve_eviction(model)
        if self.evict is not None and rule is not None:
            update["evict"] = self.evict.model_copy(update={"keep": rule.keep, "bytes": None})
        return self.model_copy(update=update)
