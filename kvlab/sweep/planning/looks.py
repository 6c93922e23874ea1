"""Plan the looks of a sweep: which seeds are still needed, from what is decided so far.

`seeds: {looks: [3, 5, 7, 10]}` asks for 3 seeds of every cell. After each look the claims that are
undecided, and not futile, get the seeds of the next one: their cells and those that these are
compared with. `kvlab.analysis.sequential` decides. A look that was taken is recorded in
``sweep.json`` and is not taken anew. If failed trials are run again after the look that ended the
sweep, they make one more look.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvlab.analysis.effects import list_compared_cells
from kvlab.analysis.estimand import Estimand
from kvlab.analysis.looks import TakenLook
from kvlab.analysis.sequential import ClaimState, Looks
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, read_rows
from kvlab.analysis.verdicts import VERDICTS, WORSE
from kvlab.errors import SpecError, UsageError
from kvlab.humanize import format_count
from kvlab.spec.decide_config import list_claims
from kvlab.spec.init_from import cell_key, get_source_levels
from kvlab.spec.seeds_config import SeedLooks
from kvlab.spec.sweep import Cell, Sweep
from kvlab.store import Store
from kvlab.store.metrics import METRICS
from kvlab.sweep.planning.planner import Plan, describe_sweep, plan
from kvlab.sweep.planning.texts import IdentifyDataset

RECORD_KEY = "looks"
"""The key of ``sweep.json`` that holds what was declared and the looks that were taken."""


@dataclass(frozen=True)
class LookPlan:
    """What the looks of a sweep ask for.

    Attributes:
        plan: All trials up to this look.
        number: Of the look that these trials are for, from 1.
        is_last: Whether no trial is needed any more, once those of the plan have ended.
        declaration: Looks, claims and cells, which must not change after the first look.
        taken: The looks that were taken.
        lines: What the last of them decided, for people.
    """

    plan: Plan
    number: int
    is_last: bool
    declaration: Mapping[str, Any]
    taken: tuple[TakenLook, ...]
    lines: tuple[str, ...]

    @property
    def record(self) -> dict[str, Any]:
        """What ``sweep.json`` keeps of it."""
        return {RECORD_KEY: {"taken": [look.to_json() for look in self.taken]}}


def plan_estimand(sweep: Sweep, cells: Sequence[Levels]) -> Estimand:
    """Return which cells of a sweep enter means over settings, before any has run."""
    factors = {
        factor: (sweep.baseline[factor], *(n for n in levels if n != sweep.baseline[factor]))
        for factor, levels in sweep.factors.items()
    }
    patches = sweep.model_dump(mode="json")["factors"]
    return Estimand(cells, factors, patches, over=sweep.decide.over or {})


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
        self._estimand = plan_estimand(sweep, [tuple(cell.levels.values()) for cell in cells])
        claims = list_claims(sweep.decide, sweep.factors, sweep.baseline, sweep.size_factor)
        self._cells_of_claim = {claim: self._list_cells(claim) for claim in claims}

    def plan(self) -> LookPlan:
        """Plan the look that the record asks for.

        Raises:
            SpecError: The sweep declares something else than before its first look.
        """
        counts = self._first_counts()
        planned = self._plan_cells(counts)
        declaration = self._declare(planned)
        taken = self._read_taken(declaration, planned)
        lines: tuple[str, ...] = ()
        states: Mapping[str, ClaimState] = {}
        maximum = len(self._seeds.looks)
        for number in range(1, maximum + 1):
            if number > 1:
                counts = self._next_counts(counts, states, number)
            last = next((look for look in reversed(taken) if look.number == number), None)
            if last is not None and last.has_open_claims and number < maximum:
                states = last.states
                continue
            while True:
                planned = self._plan_cells(counts)
                if self._store is None or not all(one.has_ended for one in planned.trials):
                    return LookPlan(planned, number, False, declaration, tuple(taken), lines)
                last = self._take_look(planned, number, taken)
                if taken and taken[-1].number == number and last.states == taken[-1].states:
                    break  # nothing is new: no failed trial has been run again
                taken.append(last)
                lines = tuple(self._describe_look(taken))
                counts = self._next_counts(counts, last.states, number)
            states = taken[-1].states
            if not taken[-1].has_open_claims:
                break
        return LookPlan(planned, number, True, declaration, tuple(taken), lines)

    def plan_most(self) -> Plan:
        """Plan what is needed at most: if nothing more is decided before the last look."""
        present = self.plan()
        if present.is_last:
            return present.plan
        counts = {tuple(c.levels.values()): len(c.trials) for c in present.plan.cells}
        states = present.taken[-1].states if present.taken else {}
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
        change = ((factor, level),)
        needed = list_compared_cells(designed, self._estimand.factors, change, self._estimand)
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

    def _read_taken(self, declaration: Mapping[str, Any], first: Plan) -> list[TakenLook]:
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
        return [TakenLook.from_json(look) for look in recorded["taken"]]

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

    def _take_look(self, planned: Plan, number: int, taken: Sequence[TakenLook]) -> TakenLook:
        """Test the claims with the trials of a plan, all of which have ended."""
        assert self._store is not None, "a look needs a record"
        description = describe_sweep(planned, yaml="", experiment_yaml="", command="")
        if taken:
            description["decide"]["metric"] = taken[0].metric
        study = Study(self._store, description, read_rows(self._store, description))
        metric = study.primary_metric
        effects = {effect.claim: effect for effect in study.mean_effects(metric)}
        differences = {
            claim: [value for _, value in effects[claim].by_seed] for claim in self._cells_of_claim
        }
        before = taken[-1].states if taken else {}
        looks = Looks(
            self._seeds.looks,
            len(self._cells_of_claim),
            self._sweep.decide.alpha,
            self._sweep.decide.margin,
            METRICS[metric].better,
        )
        states = {claim: before.get(claim, ClaimState()) for claim in self._cells_of_claim}
        allowed = {
            claim: WORSE if divergence.level >= divergence.partner else ()
            for claim in self._cells_of_claim
            if (divergence := effects[claim].divergence) is not None and divergence.is_one_sided
        }
        after = looks.take(states, differences, allowed)
        return TakenLook(number, self._seeds.looks[number - 1], metric, after)

    def _describe_look(self, taken: Sequence[TakenLook]) -> Iterator[str]:
        """Yield what the last look has decided."""
        look, states = taken[-1], taken[-1].states
        before = taken[-2].states if len(taken) > 1 else {}
        place = f"look {look.number} of {len(self._seeds.looks)}, {look.seeds} seeds"
        new = [c for c in states if states[c].outcome and not (c in before and before[c].outcome)]
        for claim in new:
            yield f"{place}: {claim} {self._describe_decision(states[claim])}"
        left = [claim for claim, state in states.items() if not state.outcome]
        if not new:
            yield f"{place}: nothing new is decided"
        if left:
            futile = sum(not states[claim].is_open for claim in left)
            note = f", {futile} of them given up" if futile else ""
            yield f"{place}: {format_count(len(left), 'claim')} undecided{note}: {', '.join(left)}"

    def _describe_decision(self, state: ClaimState) -> str:
        words = VERDICTS[state.outcome].words.format(margin=f"{self._sweep.decide.margin or 0:g}")
        return f"{words}: {state.value:+.4g} ({state.low:+.4g} to {state.high:+.4g})"
