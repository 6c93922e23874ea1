"""Looks that were taken, and the effects of a sweep as its looks have judged them.

`kvlab.extensions.looks.sequential` has the statistics.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvlab.analysis.effects import Effect, estimate_main_effects, judge_together
from kvlab.analysis.interactions import tell_settings_apart
from kvlab.analysis.statistics import Estimate
from kvlab.analysis.study import Study
from kvlab.extensions.looks.config import SeedLooks
from kvlab.extensions.looks.sequential import ClaimState, repeated_p_value, spent_share, t_bounds
from kvlab.humanize import format_count

NAME = "looks"
"""The key of ``sweep.json``, and of what it declares, that holds looks."""


@dataclass(frozen=True)
class TakenLook:
    """A look that was taken, as ``sweep.json`` holds it.

    Attributes:
        number: From 1.
        seeds: Number of seeds that were asked for up to it.
    """

    number: int
    seeds: int
    metric: str
    states: Mapping[str, ClaimState]

    @property
    def has_open_claims(self) -> bool:
        """Whether any claim is worth more seeds."""
        return any(state.is_open for state in self.states.values())

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        states = {claim: state.to_json() for claim, state in self.states.items()}
        return {**vars(self), "states": states}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "TakenLook":
        """Return what `to_json` has written."""
        states = {claim: ClaimState.from_json(one) for claim, one in fields["states"].items()}
        return cls(**{**fields, "states": states})


class LookTests:
    """The looks of a sweep as its record has them: `kvlab.analysis.sequential.SequentialTests`.

    Attributes:
        declared: Those that were declared before the first trial.
        taken: Those that were taken so far.
    """

    about = (
        "The claims are judged at the looks (see there). Each has the seeds, the interval and the"
        " p-value of its last look, and these hold for all looks together."
    )

    def __init__(self, sweep: Mapping[str, Any]):
        self.declared = SeedLooks.model_validate(sweep["stages"]["declared"][NAME]["seeds"])
        self.sizes = self.declared.looks
        recorded = (sweep.get(NAME) or {}).get("taken", ())
        self.taken = tuple(TakenLook.from_json(look) for look in recorded)

    def spent_share(self, seeds: int, alpha: float) -> float:
        return spent_share(self.sizes, seeds, alpha)

    def describe(self, effect: Effect) -> str:
        look = self._find_last_test(effect)
        return f"look {look.number}, over {format_count(look.seeds, 'seed')}" if look else ""

    def _find_last_test(self, effect: Effect) -> TakenLook | None:
        """Return the look whose seeds the state of a claim is of; None if it was never tested."""
        looks = self.taken if effect.is_claimed else ()
        sizes = looks[-1].states[effect.claim].sizes if looks else ()
        tested = (one for one in looks if sizes and one.states[effect.claim].sizes == sizes)
        return next(tested, None)

    def judge(
        self, study: Study, effects: Sequence[Effect], interactions: Sequence[Effect]
    ) -> list[Effect]:
        """Return the effects on the decided metric with the intervals of the looks.

        A claim has the seeds, the difference and the interval of its last test, which is where it
        was decided if it was. So what was trained since, for other claims, does not change it. A
        claim whose settings disagree is told apart by them; its parts share its error.
        """
        by_seeds: dict[int, dict[str, Effect]] = {}
        judged, estimand = [], study.estimand
        for effect in effects:
            look = self._find_last_test(effect)
            if look is None:
                judged.append(replace(effect, error=None, is_awaited=effect.is_claimed))
                continue
            seeds = set(self.declared.list_seeds(look.seeds))
            then = {
                levels: {seed: row for seed, row in by_seed.items() if seed in seeds}
                for levels, by_seed in study.cells.items()
            }
            if look.seeds not in by_seeds:
                at_look = estimate_main_effects(then, estimand, effect.metric)
                by_seeds[look.seeds] = {one.claim: one for one in at_look}
            states = self.taken[-1].states
            state = states[effect.claim]
            found = by_seeds[look.seeds][effect.claim]
            found = replace(found, alpha=effect.alpha, margin=effect.margin)
            share = self.spent_share(state.sizes[-1], effect.alpha) / len(states)
            alone = judge_together([found], effect.alpha * share, effect.margin)
            parts = tell_settings_apart(then, alone, interactions, estimand)
            if len(parts) > 1 or not math.isclose(found.value, state.value, abs_tol=1e-9):
                # the looks were taken at another mean, such as one over cells tied at serving
                for part in parts:
                    corrected = min(1.0, part.corrected_p / share)
                    judged.append(replace(part, alpha=effect.alpha, corrected_p=corrected))
            else:
                found = replace(found, error=None)
                judged.append(_apply_state(found, state, self.sizes[-1], len(states)))
        return judged


def _apply_state(effect: Effect, state: ClaimState, maximum: int, claims: int) -> Effect:
    """Return an effect with the numbers of a look, alone and with all claims together."""
    if effect.estimate is None or not state.error:
        return replace(effect, low=state.low, high=state.high)
    alone, corrected = repeated_p_value(state, maximum), 1.0
    if state.level:  # Holm's step is the part of alpha that the claim was tested at
        corrected = min(1.0, alone * effect.alpha / state.level)
    reach = t_bounds(state.sizes, maximum, effect.alpha)[-1] * state.error
    df, ends = state.sizes[-1] - 1, (state.value - reach, state.value + reach)
    own = Estimate(state.value, "tested", state.error, df, *ends, alone)
    effect = replace(effect, estimate=own, low=state.low, high=state.high)
    return replace(effect, corrected_p=corrected, level=effect.alpha / claims)
