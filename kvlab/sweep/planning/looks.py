"""Plan the looks of a sweep: which seeds are still needed, from what is decided so far.

`seeds: {looks: [3, 5, 7, 10]}` asks for 3 seeds of every cell. After each look the claims that are
undecided, and not futile, get the seeds of the next one: their cells and those that these are
compared with. `kvlab.analysis.sequential` decides. A look that was taken is recorded in
``sweep.json`` and is not taken anew, also if a failed trial is run again later.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvlab.analysis.effects import list_compared_cells
from kvlab.analysis.sequential import ClaimState, Looks
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, read_rows
from kvlab.errors import SpecError, UsageError
from kvlab.humanize import format_count
from kvlab.spec.decide_config import list_claims
from kvlab.spec.init_from import cell_key, get_source_levels
from kvlab.spec.seeds_config import SeedLooks
from kvlab.spec.sweep import Cell, Sweep
from kvlab.store import Store
from kvlab.store.metrics import METRICS
from kvlab.sweep.planning.planner import IdentifyDataset, Plan, describe_sweep, plan

RECORD_KEY = "looks"
"""The key of ``sweep.json`` that holds what was declared and the looks that were taken."""


@dataclass(frozen=True)
class LookPlan:
    """What the looks of a sweep ask for.

    Attributes:
        plan: All trials up to this look.
        number: Of the look that these trials are for, from 1; one more after the last.
        is_last: Whether no trial is needed any more, once those of the plan have ended.
        declaration: Looks, claims and cells, which must not change after the first look.
        record: The looks that were taken.
        lines: What the last of them decided, for people.
    """

    plan: Plan
    number: int
    is_last: bool
    declaration: Mapping[str, Any]
    record: Mapping[str, Any]
    lines: tuple[str, ...]


class LookPlanner:
    """Plan the looks of one sweep.

    Args:
        sweep: A sweep with looks.
        cells: Its cells.
        store: The record; None takes it as empty.
        identify: Returns the digest of a dataset's text; see `kvlab.sweep.plan`.
        provisional: Plan even if a dataset is unavailable; see `kvlab.sweep.plan`.
    """

    def __init__(
        self,
        sweep: Sweep,
        cells: Sequence[Cell],
        store: Store | None,
        *,
        identify: IdentifyDataset | None = None,
        provisional: bool = False,
    ):
        assert sweep.looks is not None, "only for sweeps with looks"
        self._sweep, self._cells, self._store = sweep, cells, store
        self._seeds: SeedLooks = sweep.looks
        self._identify, self._provisional = identify, provisional
        self._factors = {
            factor: (sweep.baseline[factor], *(n for n in levels if n != sweep.baseline[factor]))
            for factor, levels in sweep.factors.items()
        }
        claims = list_claims(sweep.decide, sweep.factors, sweep.baseline)
        self._looks = Looks(self._seeds.looks, len(claims), sweep.decide.alpha, sweep.decide.margin)
        self._cells_of_claim = {claim: self._list_cells(claim) for claim in claims}

    def plan(self) -> LookPlan:
        """Plan the look that the record asks for.

        Raises:
            SpecError: The sweep declares something else than before its first look.
        """
        first = self._plan_cells(self._first_counts())
        declaration = self._declare(first)
        taken = self._read_taken(declaration, first)
        counts, planned = self._first_counts(), first
        states: dict[str, ClaimState] = {}
        lines: tuple[str, ...] = ()
        for number in range(1, len(self._seeds.looks) + 1):
            if number > 1:
                counts = self._next_counts(counts, states, number)
                planned = self._plan_cells(counts)
            if number > len(taken):
                if self._store is None or not all(one.has_ended for one in planned.trials):
                    return LookPlan(planned, number, False, declaration, _record(taken), lines)
                taken.append(self._take_look(planned, number, taken))
                lines = tuple(self._describe_look(taken))
            states = _read_states(taken[number - 1])
            if not any(state.is_open for state in states.values()):
                break
        return LookPlan(planned, len(taken) + 1, True, declaration, _record(taken), lines)

    def plan_most(self) -> Plan:
        """Plan what is needed at most: if nothing more is decided before the last look."""
        present = self.plan()
        if present.is_last:
            return present.plan
        counts = {tuple(c.levels.values()): len(c.trials) for c in present.plan.cells}
        taken = present.record[RECORD_KEY]["taken"]
        states = _read_states(taken[-1]) if taken else {}
        return self._plan_cells(self._next_counts(counts, states, len(self._seeds.looks)))

    def _first_counts(self) -> dict[Levels, int]:
        """Return the number of seeds of every cell at the first look."""
        return {tuple(cell.levels.values()): self._seeds.looks[0] for cell in self._cells}

    def _next_counts(
        self, counts: Mapping[Levels, int], states: Mapping[str, ClaimState], number: int
    ) -> dict[Levels, int]:
        """Return the seeds of every cell at a look: more where a claim is still open."""
        open_claims = [c for c in self._cells_of_claim if c not in states or states[c].is_open]
        needed = set().union(*(self._cells_of_claim[claim] for claim in open_claims))
        return {
            cell: self._seeds.looks[number - 1] if cell in needed else count
            for cell, count in counts.items()
        }

    def _plan_cells(self, counts: Mapping[Levels, int]) -> Plan:
        cells = tuple(
            replace(cell, seeds=self._seeds.seeds(counts[tuple(cell.levels.values())]))
            for cell in self._cells
        )
        return plan(
            self._sweep,
            self._store,
            identify=self._identify,
            provisional=self._provisional,
            cells=cells,
        )

    def _list_cells(self, claim: str) -> set[Levels]:
        """Return the cells of a claim, with those whose trainings they start from."""
        factor, _, level = claim.partition("=")
        by_levels: dict[Levels, Cell] = {tuple(c.levels.values()): c for c in self._cells}
        designed: dict[Levels, Mapping[int, Any]] = {levels: {} for levels in by_levels}
        needed = list_compared_cells(designed, self._factors, ((factor, level),))
        by_key = {cell_key(cell.levels): levels for levels, cell in by_levels.items()}
        waiting = list(needed)
        while waiting:
            source = get_source_levels(by_levels[waiting.pop()])
            if source is not None and (levels := by_key[cell_key(source)]) not in needed:
                needed.add(levels)
                waiting.append(levels)
        return needed

    # What was declared

    def _declare(self, first: Plan) -> dict[str, Any]:
        """Return what holds from the first look on, as JSON."""
        trials = [[dict(cell.levels), sorted(cell.trials.items())] for cell in first.cells]
        design = hashlib.sha256(json.dumps(trials, sort_keys=True).encode()).hexdigest()
        decide = self._sweep.decide.model_dump(mode="json")
        return {
            "seeds": self._seeds.model_dump(mode="json"),
            "decide": {**decide, "claims": list(self._cells_of_claim)},
            "design": design[:16],
        }

    def _read_taken(self, declaration: Mapping[str, Any], first: Plan) -> list[dict[str, Any]]:
        """Return the looks that were taken.

        Raises:
            SpecError: They were declared otherwise.
        """
        if self._store is None:
            return []
        try:
            sweep = self._store.sweep(self._sweep.name)
        except UsageError:
            return []
        recorded = sweep.get(RECORD_KEY)
        if not recorded or not recorded["taken"]:
            return []
        declared = sweep["stages"]["declared"][RECORD_KEY]
        if declared != declaration and not first.absent:
            self._refuse(declared, declaration)
        return list(recorded["taken"])

    def _refuse(self, declared: Mapping[str, Any], declaration: Mapping[str, Any]) -> None:
        document = self._sweep.source.document
        hint = "restore it, or start anew with another name and seeds that no look has seen"
        for section in ("seeds", "decide"):
            for key, value in declared[section].items():
                new = declaration[section].get(key)
                if value != new:
                    text = f"{section}.{key} = {json.dumps(new)} was {json.dumps(value)} at the"
                    text += f" first look, and its error holds for that alone; {hint} (seeds.first)"
                    path = (section, key) if key in document.data.get(section, {}) else (section,)
                    raise SpecError([document.problem(path, text)])
        text = "factors: the cells compute something else than at the first look"
        raise SpecError([document.problem(("factors",), f"{text}; {hint} (seeds.first)")])

    # Look

    def _take_look(
        self, planned: Plan, number: int, taken: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Test the claims with the trials of a plan, all of which have ended."""
        assert self._store is not None, "a look needs a record"
        description = describe_sweep(planned, yaml="", experiment_yaml="", command="")
        if taken:
            description["decide"]["metric"] = taken[0]["metric"]
        study = Study(self._store, description, read_rows(self._store, description))
        metric = study.primary_metric
        by_seed = {effect.name: effect.by_seed for effect in study.effects(metric)}
        differences = {
            claim: [value for _, value in by_seed[claim]] for claim in self._cells_of_claim
        }
        before = _read_states(taken[-1]) if taken else {}
        states = {claim: before.get(claim, ClaimState()) for claim in self._cells_of_claim}
        after = self._looks.take(states, differences)
        return {
            "look": number,
            "seeds": self._seeds.looks[number - 1],
            "metric": metric,
            "claims": {claim: state.to_json() for claim, state in after.items()},
        }

    def _describe_look(self, taken: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield what the last look has decided."""
        look = taken[-1]
        states = _read_states(look)
        before = _read_states(taken[-2]) if len(taken) > 1 else {}
        place = f"look {look['look']} of {len(self._seeds.looks)}, {look['seeds']} seeds"
        new = [c for c in states if states[c].outcome and not (c in before and before[c].outcome)]
        for claim in new:
            yield f"{place}: {claim} {describe_decision(states[claim], look['metric'])}"
        left = [claim for claim, state in states.items() if not state.outcome]
        still_open = [claim for claim in left if states[claim].is_open]
        if not new:
            yield f"{place}: nothing new is decided"
        if left:
            futile = len(left) - len(still_open)
            note = f", {futile} of them given up" if futile else ""
            yield f"{place}: {format_count(len(left), 'claim')} undecided{note}: {', '.join(left)}"


def describe_decision(state: ClaimState, metric: str) -> str:
    """Return what was decided about a claim, with its repeated interval, in the metric's unit."""
    interval = f"{state.value:+.4g} ({state.low:+.4g} to {state.high:+.4g})"
    better = METRICS[metric].better
    words = {
        "higher": "is better" if better == "higher" else "is worse",
        "lower": "is better" if better == "lower" else "is worse",
        "equivalent": "differs by less than the margin",
        "identical": "is identical",
    }
    if better == "neither":
        words |= {"higher": "is higher", "lower": "is lower"}
    return f"{words[state.outcome]}: {interval}"


def _record(taken: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {RECORD_KEY: {"taken": list(taken)}}


def _read_states(look: Mapping[str, Any]) -> dict[str, ClaimState]:
    return {claim: ClaimState.from_json(state) for claim, state in look["claims"].items()}
