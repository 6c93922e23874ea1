"""`serving` of an experiment: what changes only inference."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kvlab.spec.dtypes import DTYPES, MIN_GROUP, MODEL_DTYPE, list_kv_dtypes
from kvlab.spec.eviction_config import EvictConfig, EvictionRule
from kvlab.spec.kv_storage import KVStorage
from kvlab.spec.model_config import ModelConfig, SharingField
from kvlab.spec.spec_model import (
    FieldMessage,
    NonNegativeInt,
    OneOf,
    PositiveInt,
    SpecModel,
    raise_problems,
)


class ServingConfig(SpecModel):
    """`serving`: what changes only inference. It never retrains.

    ``tie`` joins layers on one cache slot though each was trained with its own K/V. With
    ``tie_rule: overwrite`` every layer writes the shared slot and the last one wins, as in the
    code of the Character.AI article; with ``owner`` only the first layer of a group writes.
    """

    omitted_defaults: ClassVar[dict[str, Any]] = {
        "kv_group": None,
        "kv_residual": None,
        "evict": None,
        "compile": False,
    }

    kv_dtype: Annotated[str, OneOf(list_kv_dtypes)] = "model"
    """How K/V are stored; model keeps the model's dtype. Example: int8"""
    kv_group: Annotated[PositiveInt, Field(ge=MIN_GROUP)] | None = None
    """Numbers of a head that share a scale, in a kv_dtype with scales. It divides head_dim. In
    kivi4 and kivi2 it is also the tokens of a block of keys.
    Unit: numbers. Default: 32 (at most head_dim) for int4, kivi4 and kivi2, and the whole head for
    int8 and fp8. Example: 16, kv_dtype: int4"""
    kv_residual: NonNegativeInt | None = None
    """Newest tokens that kivi4 and kivi2 store in the model's dtype.
    Unit: tokens. Default: 128 for kivi4 and kivi2. Example: 64, kv_dtype: kivi2"""
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

    @model_validator(mode="after")
    def _check(self) -> "ServingConfig":
        raise_problems(self.kv.find_setting_problems())
        raise_problems(self._find_compile_problems())
        return self

    def _find_compile_problems(self) -> Iterator[FieldMessage]:
        if self.compile and (self.kv.blocks is not None or self.evict is not None):
            cause = "serving.evict" if self.evict is not None else f"kv_dtype {self.kv_dtype}"
            text = f"needs steps of fixed shapes, which {cause} does not have"
            yield "compile", f"{text}; leave one of the two out"

    @property
    def kv(self) -> KVStorage:
        """How the cache stores K and V."""
        return KVStorage(self.kv_dtype, self.kv_group, self.kv_residual)

    def find_eviction_problems(
        self, model: ModelConfig, slots: Sequence[int]
    ) -> Iterator[FieldMessage]:
        """Yield why tokens of ``model`` cannot be evicted, by fields of a spec.

        Args:
            slots: the slot that each layer reads.
        """
        if self.evict is None:
            return
        is_global = [layer.window is None for layer in model.layers]
        shared = [slot for slot in slots if is_global[slot] and slots.count(slot) > 1]
        if not any(is_global):
            text = "has no layer to act on: all have a window, whose ring drops tokens by itself"
            yield "serving.evict", f"{text}; leave it out, or use a pattern with G"
        elif self.kv.blocks is not None:
            text = f"cannot drop single tokens from the blocks of kv_dtype {self.kv_dtype}"
            yield "serving.evict", f"{text}; use int4, int8 or fp8, or leave one out"
        elif self.evict.prompt is not None and self.evict.prompt >= model.block_size:
            text = f"leaves no token of block_size = {model.block_size} to decode after it"
            yield "serving.evict.prompt", f"{text}; use less"
        elif self.evict.by != "recency" and model.kv != "separate":
            text = "ranks tokens by stored keys, so it needs model.kv: separate"
            yield "serving.evict.by", f"{text}; use recency"
        elif self.evict.by != "recency" and shared:
            text = "would differ between the layers that share the slot of layer"
            text = f"{text} {shared[0]}"
            yield "serving.evict.by", f"{text}; use recency, or share no K/V"
        elif self.evict.bytes is not None:
            keep = self._find_kept_tokens(self.evict, model, slots)
            for name, message in self.evict.find_budget_problems(keep):
                yield f"serving.evict.{name}", message

    def resolve_eviction(self, model: ModelConfig, slots: Sequence[int]) -> EvictionRule | None:
        """Return which tokens global slots keep; None for all.

        Args:
            slots: the slot that each layer reads.
        """
        if self.evict is None:
            return None
        keep = self.evict.keep or self._find_kept_tokens(self.evict, model, slots)
        return self.evict.resolve(keep)

    def _find_kept_tokens(
        self, evict: EvictConfig, model: ModelConfig, slots: Sequence[int]
    ) -> int:
        """Return how many tokens global slots may keep in a budget of bytes, possibly none.

        The budget is of the cache of one sequence of ``block_size`` tokens in a trial's dtype.
        """
        assert evict.bytes is not None
        dtype = DTYPES[MODEL_DTYPE if self.kv_dtype == "model" else self.kv_dtype]
        rings = tokens = scores = 0
        for slot in set(slots):
            layer = model.layers[slot]
            token = sum(one.count * dtype.vector_bytes(one.size, self.kv_group)
                        for one in layer.stored)  # fmt: skip
            if layer.window is None:
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

    def store_as_model(self, eviction: EvictionRule | None) -> "ServingConfig":
        """Return the same serving with K and V in the model's dtype.

        Args:
            eviction: of `resolve_eviction`: as many tokens are kept, whatever they take.
        """
        update: dict[str, Any] = {"kv_dtype": "model", "kv_group": None, "kv_residual": None}
        if self.evict is not None and eviction is not None:
            update["evict"] = self.evict.model_copy(update={"keep": eviction.keep, "bytes": None})
        return self.model_copy(update=update)
