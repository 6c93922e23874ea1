"""Model shapes by name: `presets.toml` has them with their sources."""

import tomllib
from pathlib import Path
from typing import Any

from kvlab.own_extensions import find_members


def _read_presets() -> dict[str, dict[str, Any]]:
    """Return the keys of every preset with those of the one that it is like."""
    text = Path(__file__).with_name("presets.toml").read_text(encoding="utf-8")
    presets: dict[str, dict[str, Any]] = {}
    for name, own in tomllib.loads(text).items():
        presets[name] = {**presets.get(own.pop("like", ""), {}), **own}
    return presets


PRESETS = _read_presets() | find_members("presets")

ACTIVE_EXPERTS = (
    "its experts count as one dense MLP as wide as those that a token passes through, so"
    " parameters, weights and FLOPs are those that are active"
)

PRESET_NOTES = {
    **find_members("preset_notes"),
    "gpt-oss-20b": f"{ACTIVE_EXPERTS}; its SwiGLU is not clamped",
    "gpt-oss-120b": f"{ACTIVE_EXPERTS}; its SwiGLU is not clamped",
}
"""What a preset leaves out of the published model; it changes no byte of K/V."""
