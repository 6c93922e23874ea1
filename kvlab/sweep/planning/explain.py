"""Explain why two cells of a plan compute the same."""

from kvlab.spec.experiment import Experiment
from kvlab.store.result import flatten

_ROTATION = ("model.rope_theta", "model.rotary_share", "model.rope_scaling")
_KINDS = ("model.local", "model.global", "model.kinds")
_REASONS = {
    "model.window": "a window of the block size or more is global attention",
    "model.attention_pattern": "the same layers are global and local",
    "model.kv_sharing": "the same layers own their K/V",
    **dict.fromkeys(_ROTATION, "nothing is rotated"),
    **dict.fromkeys(_KINDS, "every layer has the same settings"),
    "serving.tie": "the same cache slots",
    "serving.tie_rule": "nothing is tied",
    "evaluation.served_tokens": "as many tokens are scored",
    "evaluation.hellaswag": "the same items are scored",
}
"""Fields that can be written in several ways for one computation, the strongest reason first."""


def explain_equality(one: Experiment, other: Experiment) -> str:
    """Return in one line what is written differently, and why that changes nothing."""
    here, there = (
        dict(flatten(experiment.model_dump(mode="json", exclude={"name", "description"})))
        for experiment in (one, other)
    )
    differing = [key for key in {**there, **here} if here.get(key) != there.get(key)]
    if not differing:
        return "the same values"
    roots = {*differing, *(".".join(key.split(".")[:2]) for key in differing)}
    otherwise = "where and how often something is done, not what comes out"
    reason = next((text for key, text in _REASONS.items() if key in roots), otherwise)
    return f"{', '.join(differing)}: {reason}"
