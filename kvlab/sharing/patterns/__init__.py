"""The sharing patterns, one file each: ``pattern(argument, kinds) -> groups of layers``."""

from collections.abc import Callable

from kvlab.sharing.pattern import Groups
from kvlab.sharing.patterns import adjacent, character_ai, none, sandwich, trailing

PATTERNS: dict[str, Callable[[str, str], Groups]] = {
    "none": none.groups,
    "adjacent": adjacent.groups,
    "character-ai": character_ai.groups,
    "trailing": trailing.groups,
    "sandwich": sandwich.groups,
}

__all__ = ["PATTERNS"]
