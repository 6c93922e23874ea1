"""`training.kv_routing`: which earlier layers' K/V a layer reads in a step. No torch."""

import hashlib
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from kvlab.sharing import SharingError, owner_map, tied_slots
from kvlab.spec import spec_model as spec
from kvlab.spec.model_config import ModelConfig, SharingField

if TYPE_CHECKING:
    from kvlab.spec.experiment import Experiment
    from kvlab.spec.training_config import TrainingConfig

ANY = "any"
"""``depth`` that allows all earlier layers of a kind."""

Choices = tuple[tuple[int, ...], ...]
"""For every layer the layers whose K/V it may read, its own (or its trained owner's) first."""


class KVRouting(spec.SpecModel):
    """`training.kv_routing`: in a step, a layer reads its own K/V or those of an earlier layer.

    Random cross-layer attention (arXiv 2604.22782). The layers are drawn anew for every step, each
    by itself, from the seed, the step and the layer's number alone. The model so trained can be
    served untied, and with serving.tie. Losses that are measured are without routing.
    """

    share: Annotated[float, Field(ge=0.0, le=1.0)]
    """The part of the steps in which a layer reads an earlier layer's K/V, where there is one; 0
    is the plain training, with the same id.
    Unit: none. Example: 0.5"""
    depth: SharingField = ANY
    """Which earlier layers: any of the same kind, or the first layer of the group in a pattern, as
    in model.kv_sharing and serving.tie. A pattern trains what serving.tie_rule: owner serves.
    Example: 'adjacent:2', share: 0.5"""

    def find_choices(self, model: ModelConfig) -> Choices:
        """Return whose K/V each layer of ``model`` may read.

        Raises:
            SharingError: the pattern is impossible on these layers.
        """
        owners, kinds = model.kv_owners, model.layer_kinds
        has_kv = [layer.stores_tokens for layer in model.layers]
        if self.depth != ANY:
            slots = tied_slots(owners, owner_map(self.depth, kinds), "owner")
            pairs = zip(owners, slots, has_kv, strict=True)
            return tuple(
                (own, slot) if own != slot and reads else (own,) for own, slot, reads in pairs
            )
        writers = [owner for owner in sorted(set(owners)) if has_kv[owner]]
        return tuple(
            (owner, *(i for i in writers if i < layer and i != owner and kinds[i] == kinds[layer]))
            for layer, owner in enumerate(owners)
        )

    def find_problems(self, model: ModelConfig) -> spec.Problems:
        """Yield why ``model`` cannot be trained so."""
        try:
            choices = self.find_choices(model)
        except SharingError as error:
            yield "depth", str(error)
            return
        if all(len(layers) == 1 for layers in choices):
            text = "gives no layer another's K/V to read: layers of a kind are too few, or share"
            yield "depth", f"{text} theirs already; use a pattern that joins some, or leave it out"

    def computation(self, model: ModelConfig) -> dict[str, Any]:
        """Return what is computed, as plain data, equal for all spellings of it."""
        if not self.share:
            return {}
        choices = [list(layers) for layers in self.find_choices(model)]
        return {"kv_routing": {"share": self.share, "choices": choices}}

    def draw_picks(self, choices: Choices, seed: int, step: int) -> tuple[int, ...]:
        """Return for every layer the index of what it reads in its ``choices``.

        Two words are hashed from seed, step and layer. The first decides whether the layer reads
        another one, the second which. So all cells of a seed, all workers, and a training that
        resumes draw alike, and more layers or a larger ``share`` change no other draw.
        """
        picks = []
        for layer, (_, *others) in enumerate(choices):
            digest = hashlib.sha256(f"kv_routing:{seed}:{step}:{layer}".encode()).digest()
            whether, which = (int.from_bytes(digest[i : i + 8], "little") for i in (0, 8))
            is_routed = bool(others) and whether < self.share * 2**64
            picks.append(1 + which * len(others) // 2**64 if is_routed else 0)
        return tuple(picks)


class RoutingFields(spec.SpecModel):
    """What `training` gets."""

    omitted_defaults = frozenset({"kv_routing"})

    kv_routing: KVRouting | None = None
    """In each step layers read earlier layers' K/V at random, so that one training serves untied
    and tied.
    Example: {share: 0.5}"""

    def identity_of(self, model: ModelConfig) -> dict[str, Any]:
        facts = super().identity_of(model)
        facts.pop("kv_routing", None)
        return facts | ({} if self.kv_routing is None else self.kv_routing.computation(model))


def find_problems(experiment: "Experiment") -> spec.Problems:
    """Yield why a model cannot be trained so."""
    training = experiment.training
    routing = RoutingFields.of(training).kv_routing
    if routing is None:
        return
    problems = routing.find_problems(experiment.model)
    yield from ((f"training.kv_routing.{name}", text) for name, text in problems)
    if training.kv.block_dtype is not None:
        text = f"keeps blocks of exact tokens beside kv_dtype {training.kv_dtype}'s codes for each"
        yield "training.kv_routing", f"{text} layer and cannot be routed; use int8 or int4"


def draw_reads(training: "TrainingConfig", model: ModelConfig, seed: int, step: int) -> Any:
    """Return the `KVRoutes` of one step, or None without any. Imports torch."""
    routing = RoutingFields.of(training).kv_routing
    if routing is None or not routing.share:
        return None
    choices = routing.find_choices(model)
    routes = resolve_name("kvlab.extensions.kv_routing.routed_pass:KVRoutes")
    return routes(choices, routing.draw_picks(choices, seed, step))
