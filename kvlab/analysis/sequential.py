"""Claims that are tested while a sweep gets seeds, as extensions test them.

A sweep declares such tests before its first trial: ``stages.declared`` of ``sweep.json`` has them
by a key of the table ``sequential_tests``. Under the same key ``sweep.json`` keeps those that were
``taken``. Their error holds for the results that they had.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvlab.analysis.effects import Effect
from kvlab.own_extensions import find_member, name_members

if TYPE_CHECKING:
    from kvlab.analysis.study import Study


class SequentialTests(Protocol):
    """Tests that a sweep has declared, with those that were taken. It is made from its record.

    Attributes:
        sizes: Number of seeds of a cell at each test, increasing.
        about: What a report says of the claims beside its table of effects.
    """

    sizes: tuple[int, ...]
    about: str

    def judge(
        self, study: "Study", effects: Sequence[Effect], interactions: Sequence[Effect]
    ) -> list[Effect]:
        """Return the effects on the decided metric as the tests have judged them.

        Args:
            effects: Mean effects over settings and all seeds, see `Study.mean_effects`.
            interactions: Interactions over all seeds, judged.
        """

    def spent_share(self, seeds: int, alpha: float) -> float:
        """Return the part of a test's level that may be spent on a comparison of so many seeds."""

    def describe(self, effect: Effect) -> str:
        """Return which test has judged a claim, in words; empty if none has."""


def read_tests(sweep: Mapping[str, Any]) -> SequentialTests | None:
    """Return the tests of a sweep's record; None if it has declared none."""
    declared = (sweep.get("stages") or {}).get("declared", {})
    names = [name for name in name_members("sequential_tests") if name in declared]
    return find_member("sequential_tests", names[0])(sweep) if names else None


def has_taken_tests(record: Mapping[str, Any]) -> bool:
    """Return whether claims were tested, by the content of ``sweep.json`` or a stage's part."""
    return any((record.get(name) or {}).get("taken") for name in name_members("sequential_tests"))
