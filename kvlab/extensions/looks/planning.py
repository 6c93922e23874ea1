"""Plan the looks of a sweep: which seeds are still needed, from what is decided so far.

`seeds: {looks: [3, 5, 7, 10]}` asks for 3 seeds of every cell. After each look the claims that are
undecided, and not futile, get the seeds of the next one: their cells and those that these are
compared with. `kvlab.extensions.looks.sequential` decides. A look that was taken is recorded in
``sweep.json`` and is not taken anew. If failed trials are run again after the look that ended the
sweep, they make one more look.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvlab.analysis.effects import list_compared_cells
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, read_rows
from kvlab.analysis.verdicts import WORSE, write_verdict
from kvlab.errors import RecordDamaged, SpecError
from kvlab.extensions.looks.config import SeedLooks
from kvlab.extensions.looks.judgement import NAME, TakenLook
from kvlab.extensions.looks.sequential import ClaimState, Looks
from kvlab.humanize import format_count
from kvlab.spec.sweep import Cell
from kvlab.store.metrics import METRICS
from kvlab.store.record_forms import refuse_malformed
from kvlab.sweep.planning.planner import Plan, Stage, SweepPlanner, describe_sweep, plan_estimand


class LookPlanner:
    """Plan the looks of one sweep; see `kvlab.sweep.planning.stages`."""

    def __init__(self, planner: SweepPlanner, cells: Sequence[Cell]):
        sweep = planner.sweep
        assert isinstance(sweep.seeds, SeedLooks), "only for sweeps with looks"
        self._planner, self._sweep, self._store = planner, sweep, planner.store
        self._cells = {tuple(cell.levels.values()): cell for cell in cells}
        self._seeds = sweep.seeds
        self._estimand = plan_estimand(sweep, list(self._cells))
        self._cells_of_claim = {claim: self._list_cells(claim) for claim in sweep.claims}

    def plan(self) -> Stage:
        """Return the look that the record asks for."""
        counts = dict.fromkeys(self._cells, self._seeds.looks[0])
        planned = self._plan_cells(counts)
        trials = [[dict(cell.levels), sorted(cell.trials.items())] for cell in planned.cells]
        design = hashlib.sha256(json.dumps(trials, sort_keys=True).encode()).hexdigest()
        decide = self._sweep.decide.model_dump(mode="json")
        declaration = {  # holds from the first look on
            "seeds": self._seeds.model_dump(mode="json"),
            "decide": {**decide, "claims": list(self._cells_of_claim)},
            "design": design[:16],
        }
        taken = self._read_taken(declaration, planned)
        lines: tuple[str, ...] = ()
        states: Mapping[str, ClaimState] = {}
        maximum = len(self._seeds.looks)

        def make_stage(name: str, *, is_last: bool) -> Stage:
            record = {NAME: {"taken": [look.to_json() for look in taken]}}
            declared = {NAME: declaration}
            return Stage(planned, name, len(taken) + 1, is_last, declared, record, lines)

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
                    return make_stage(f"look {number} of {maximum}", is_last=False)
                last = self._take_look(planned, number, taken)
                if taken and taken[-1].number == number and last.states == taken[-1].states:
                    break  # nothing is new: no failed trial has been run again
                taken.append(last)
                lines = tuple(self._describe_look(taken))
                counts = self._next_counts(counts, last.states, number)
            states = taken[-1].states
            if not taken[-1].has_open_claims:
                break
        return make_stage("all looks taken", is_last=True)

    def plan_most(self) -> Plan:
        """Plan what is needed at most: if nothing more is decided before the last look."""
        present = self.plan()
        if present.is_last:
            return present.plan
        counts = {tuple(c.levels.values()): len(c.trials) for c in present.plan.cells}
        taken = present.record[NAME]["taken"]
        states = TakenLook.from_json(taken[-1]).states if taken else {}
        return self._plan_cells(self._next_counts(counts, states, len(self._seeds.looks)))

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
        seeds = {levels: self._seeds.list_seeds(count) for levels, count in counts.items()}
        cells = [replace(cell, seeds=seeds[levels]) for levels, cell in self._cells.items()]
        return self._planner.plan(cells)

    def _list_cells(self, claim: str) -> set[Levels]:
        """Return the cells of a claim, with those whose trainings they start from."""
        factor, _, level = claim.partition("=")
        designed: dict[Levels, Mapping[int, Any]] = {levels: {} for levels in self._cells}
        change = ((factor, level),)
        needed = list_compared_cells(designed, change, self._estimand)
        by_key = {cell.key: levels for levels, cell in self._cells.items()}
        waiting = list(needed)
        while waiting:
            source = self._cells[waiting.pop()].source_key
            if source is not None and (levels := by_key[source]) not in needed:
                needed.add(levels)
                waiting.append(levels)
        return needed

    def _read_taken(self, declaration: Mapping[str, Any], first: Plan) -> list[TakenLook]:
        """Return the looks that were taken. Those that are malformed are taken again."""
        recorded, taken = self._planner.read_record(), list[TakenLook]()
        with contextlib.suppress(RecordDamaged), refuse_malformed(self._sweep.name):
            declared = recorded["stages"]["declared"][NAME]
            taken = [TakenLook.from_json(look) for look in recorded[NAME]["taken"]]
        if not taken or declared == declaration or first.absent:
            return taken
        document, path = self._sweep.source.document, tuple[str, ...](("factors",))
        text = "factors: the cells compute something else than at the first look"
        keys = [(section, key) for section in ("seeds", "decide") for key in declared[section]]
        for section, key in reversed(keys):  # the first that differs remains
            old, new = declared[section][key], declaration[section].get(key)
            if old != new:
                text = f"{section}.{key} = {json.dumps(new)} was {json.dumps(old)} at the first"
                text += " look, and its error holds for that alone"
                path = (section, key) if key in document.data.get(section, {}) else (section,)
        hint = "restore it, or start anew with another name and seeds that no look has seen"
        raise SpecError([document.problem(path, f"{text}; {hint} (seeds.first)")])

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
        before, decide = taken[-1].states if taken else {}, self._sweep.decide
        facts = (len(self._cells_of_claim), decide.alpha, decide.margin, METRICS[metric].better)
        looks = Looks(self._seeds.looks, *facts)
        states = {claim: before.get(claim, ClaimState()) for claim in self._cells_of_claim}
        allowed = {
            claim: WORSE if divergence.level >= divergence.partner else ()
            for claim in self._cells_of_claim
            if (divergence := effects[claim].divergence) is not None and divergence.is_one_sided
        }
        least_errors = {claim: effects[claim].least_error for claim in self._cells_of_claim}
        after = looks.take(states, differences, allowed, least_errors)
        return TakenLook(number, self._seeds.looks[number - 1], metric, after)

    def _describe_look(self, taken: Sequence[TakenLook]) -> Iterator[str]:
        """Yield what the last look has decided."""
        look, states = taken[-1], taken[-1].states
        before = taken[-2].states if len(taken) > 1 else {}
        place = f"look {look.number} of {len(self._seeds.looks)}, {look.seeds} seeds"
        new = [c for c in states if states[c].outcome and not (c in before and before[c].outcome)]
        for claim in new:
            state = states[claim]
            words = write_verdict(state.outcome, self._sweep.decide.margin, look.metric)
            reach = f"{state.value:+.4g} ({state.low:+.4g} to {state.high:+.4g})"
            yield f"{place}: {claim} {words}: {reach}"
        left = [claim for claim, state in states.items() if not state.outcome]
        if not new:
            yield f"{place}: nothing new is decided"
        if left:
            futile = sum(not states[claim].is_open for claim in left)
            note = f", {futile} of them given up" if futile else ""
            yield f"{place}: {format_count(len(left), 'claim')} undecided{note}: {', '.join(left)}"
