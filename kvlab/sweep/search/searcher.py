"""A search: suggestions become cells, trials and results, and the history is on disk.

    <store>/sweeps/<name>/search.json    every suggestion, what became of it, and the time spent

Each suggestion is a level of one factor, ``point``, whose baseline is the base experiment; so a
search is recorded, mirrored and reported like any sweep.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from pydantic import ValidationError

from kvlab.errors import SpecError, StoreError, UsageError
from kvlab.spec.experiment import Experiment
from kvlab.spec.overrides import apply_patch
from kvlab.spec.sweep import SEARCH_FACTOR, Cell
from kvlab.store import Store
from kvlab.sweep.planning.planner import IdentifyDataset, Plan, PlannedTrial, plan
from kvlab.sweep.search.objectives import (
    check_objectives,
    limit_violations,
    objective_direction,
    planned_metrics,
)
from kvlab.sweep.search.optuna_sampler import Direction, suggest_params
from kvlab.sweep.search.pruner import Pruner
from kvlab.sweep.search.search_history import Suggestion, load_history, save_history

MAX_FRUITLESS_SUGGESTIONS = 200
"""Suggestions in a row that lead to no new trial, before the space counts as exhausted."""


class Searcher:
    """Gives the driver trials, and takes how they end.

    Args:
        describe: the record of a sweep from its plan, for ``sweep.json``.
        base: the plan of the base experiment alone.

    Raises:
        SpecError: an objective or a limit is no number that is measured or known.
        StoreError: the history on disk is damaged, or of another search.
    """

    def __init__(
        self,
        base: Plan,
        store: Store,
        describe: Callable[[Plan], dict[str, Any]],
        identify: IdentifyDataset | None = None,
    ):
        sweep = base.sweep
        assert sweep.search is not None, "only for sweeps with a search"
        check_objectives(sweep)
        self._sweep, self._config, self._store = sweep, sweep.search, store
        self._describe, self._identify = describe, identify
        self.plan = base
        self._path = store.sweep_directory(sweep.name) / "search.json"
        self._planned: dict[str, PlannedTrial] = {}
        self.points, self._spent = load_history(self._path, self._config)
        self._rungs = Pruner(self._config.pruning, self.points)
        self._began = time.monotonic()
        self.stop_reason = ""
        self._resumed = [point for point in self.points if point.past.state == "open"]
        for point in self.points:
            if point.trial:
                self._restore(point)

    def _restore(self, point: Suggestion) -> None:
        planned = self._plan(point)
        if planned is None or planned.trial.id != point.trial:
            text = f"{self._path}: {point.level} is no longer what was run; its base or its text"
            raise StoreError(f"{text} has changed; give the sweep another name to search anew")
        self._note_cost(point, planned)
        self._aim(point)

    def ask(self) -> PlannedTrial | None:
        """The next suggestion that is a new trial; None while enough are in flight, or at the end
        (see ``stop_reason``). One that was pruned comes again when its rung has room."""
        if self._resumed:
            return self._aim(self._resumed.pop(0))
        in_flight = len({point.trial for point in self.points if point.past.state == "open"})
        if in_flight >= self._config.parallel:
            return None
        over = self._is_over()
        promoted = self._promotable(at_end=over and not in_flight)
        if promoted is not None or over:
            return promoted
        for _ in range(MAX_FRUITLESS_SUGGESTIONS):
            planned = self._suggest()
            if planned is not None:
                return planned
        self.stop_reason = f"the last {MAX_FRUITLESS_SUGGESTIONS} suggestions led to nothing new"
        return self._promotable(at_end=not in_flight)

    def tell(self, planned: PlannedTrial, status: str) -> None:
        for point in self.points:
            if point.trial == planned.trial.id and point.past.state == "open":
                self._tell(point, status)
        self._save()

    def resume_or_prune(self, planned: PlannedTrial) -> PlannedTrial | None:
        """Decides about one at its rung.

        Raises:
            StoreError: the loss there is not in the record.
        """
        point = self._of(planned.trial.id)
        if point is None or point.past.state != "open":
            return None  # it was decided before a kill, and that was not recorded
        rung = self._rungs.until(point)
        loss = self._store.rungs(point.training).get(rung or 0)
        if loss is None:
            text = f"training {point.training} has paused, and its rungs.json has no step {rung}"
            raise StoreError(f"{text}; remove that file to train to the rung again")
        self._set(point, "pruned", [*point.past.rungs, loss])
        if not self._is_spent() and self._rungs.goes_on(point):
            self._set(point, "open", point.past.rungs)
        self._save()
        return self._aim(point) if point.past.state == "open" else None

    def promote(self, trial_id: str) -> None:
        """Lets a pruned trial be trained to its end, by a person's wish.

        Raises:
            UsageError: it is no pruned trial of this search.
        """
        point = self._of(trial_id)
        if point is None or point.past.state != "pruned":
            text = f"--promote = {trial_id} is no pruned trial of {self._sweep.name}"
            raise UsageError(f"{text}; see `kvlab status {self._sweep.name}`")
        point.kept = True
        self._set(point, "open", point.past.rungs)
        self._save()
        self._resumed.append(point)

    @property
    def flops(self) -> float:
        """Training FLOPs really spent, with what is in flight."""
        return self._rungs.flops()

    def best(self) -> list[Suggestion]:
        """The suggestions that no other one beats in all objectives, within the limits."""
        ok = [point for point in self.points if point.past.state == "ok" and point.trained]
        return [point for point in ok if not any(self._beats(other, point) for other in ok)]

    @property
    def seconds(self) -> float:
        """Time spent searching, over all runs."""
        return self._spent + time.monotonic() - self._began

    def _suggest(self) -> PlannedTrial | None:
        past = suggest_params(
            self._config, self._directions(), [point.past for point in self.points]
        )
        patch = {
            key: self._config.choices[key][value] if key in self._config.choices else value
            for key, value in past.params.items()
        }
        point = Suggestion(past, f"p{len(self.points) + 1:04d}", patch)
        self.points.append(point)
        planned = self._plan(point)
        if planned is None or not self._within(point, planned):
            self._save()
            return None
        point.trial = planned.trial.id
        self._note_cost(point, planned)
        earlier = next((p for p in self.points[:-1] if p.trial == point.trial and p.trained), None)
        if earlier is not None:
            point.why = f"computes the same as {earlier.level}"
            if earlier.past.state != "open":
                point.past = replace(earlier.past, params=past.params, notes=past.notes)
        self._save()
        if point.why:
            return None
        self._store.write_sweep(self._describe(self.plan))
        return self._aim(point)

    def _note_cost(self, point: Suggestion, planned: PlannedTrial) -> None:
        point.training, point.flops = planned.trial.training_id, planned.flops
        point.steps = planned.trial.experiment.training.steps

    def _of(self, trial_id: str) -> Suggestion | None:
        return next((p for p in self.points if p.trial == trial_id and p.trained), None)

    def _set(self, point: Suggestion, state: Literal["open", "pruned"], rungs: list[float]) -> None:
        """Also of suggestions that compute the same."""
        for same in self.points:
            if same.trial == point.trial and same.past.state in ("open", "pruned"):
                same.past.state, same.past.rungs = state, rungs

    def _aim(self, point: Suggestion) -> PlannedTrial:
        """The point's trial with the step at which it is to pause, here and in the plan."""
        planned = self._planned[point.trial]
        aimed = replace(planned, trial=replace(planned.trial, until=self._rungs.until(point)))
        self._planned[point.trial] = aimed
        trials = tuple(aimed if one is planned else one for one in self.plan.trials)
        self.plan = replace(self.plan, trials=trials)
        return aimed

    def _promotable(self, *, at_end: bool) -> PlannedTrial | None:
        """One that was pruned and goes on after all."""
        point = None if self._is_spent() else self._rungs.promotable(at_end=at_end)
        if point is None and at_end:
            point = self._rungs.furthest()
        if point is None:
            return None
        self._set(point, "open", point.past.rungs)
        self._save()
        return self._aim(point)

    def _plan(self, point: Suggestion) -> PlannedTrial | None:
        """The trial of a suggestion, which joins the plan; None if it is not possible."""
        self._sweep.factors[SEARCH_FACTOR][point.level] = point.patch
        try:
            data = apply_patch(
                self._sweep.source.base, self._sweep.patch(SEARCH_FACTOR, point.level)
            )
            experiment = Experiment.model_validate(data)
        except (ValidationError, SpecError) as error:
            del self._sweep.factors[SEARCH_FACTOR][point.level]
            point.past.state, point.past.excess = "beyond", {"possible": 1.0}
            point.why = f"is not possible: {_first_message(error)}"
            return None
        cell = Cell({SEARCH_FACTOR: point.level}, experiment, self._sweep.seeds)
        found = plan(self._sweep, self._store, identify=self._identify, cells=(cell,))
        planned = found.trials[0]
        self._planned[planned.trial.id] = planned
        if not any(one.trial.id == planned.trial.id for one in self.plan.trials):
            self.plan = replace(self.plan, trials=(*self.plan.trials, planned))
        self.plan = replace(self.plan, cells=(*self.plan.cells, *found.cells))
        return planned

    def _within(self, point: Suggestion, planned: PlannedTrial) -> bool:
        """Whether what is known beforehand keeps the limits."""
        point.past.excess = limit_violations(self._config.limits, planned_metrics(planned))
        if any(over > 0 for over in point.past.excess.values()):
            point.past.state, point.why = "beyond", "is beyond a limit"
            self._leave_out(point)
            return False
        return True

    def _leave_out(self, point: Suggestion) -> None:
        """A suggestion that is never run is no cell of the record."""
        del self._sweep.factors[SEARCH_FACTOR][point.level]
        kept = tuple(c for c in self.plan.cells if c.levels != {SEARCH_FACTOR: point.level})
        asked = {trial for cell in kept for trial in cell.trials.values()}
        trials = tuple(one for one in self.plan.trials if one.trial.id in asked)
        self.plan = replace(self.plan, cells=kept, trials=trials)

    def _tell(self, point: Suggestion, status: str) -> None:
        planned = self._planned[point.trial]
        result = (self._store.result(point.trial) or {}) if status == "done" else {}
        found = {**planned_metrics(planned), **result.get("measurements", {})}
        missing = [name for name in self._config.objectives if name not in found]
        if status == "diverged":
            point.past.state, point.past.excess = "beyond", {"diverged": 1.0}
        elif status != "done" or missing:
            point.past.state = "lost"
        else:
            point.past.values = [float(found[name]) for name in self._config.objectives]
            point.past.excess = limit_violations(self._config.limits, found)
            broken = any(over > 0 for over in point.past.excess.values())
            point.past.state = "beyond" if broken else "ok"

    def _is_over(self) -> bool:
        """Whether no more suggestions are made."""
        trained = sum(point.trained for point in self.points)
        if self._is_spent():
            return True
        if self._config.trials is not None and trained >= self._config.trials:
            self.stop_reason = f"{trained:,} trials are the budget"
        return bool(self.stop_reason)

    def _is_spent(self) -> bool:
        """Whether there are neither FLOPs nor hours left, for promotions neither."""
        config = self._config
        if config.flops is not None and self.flops >= config.flops:
            self.stop_reason = f"{self.flops:.3g} of {config.flops:.3g} training FLOPs are spent"
            return True
        if config.hours is not None and self.seconds >= 3600 * config.hours:
            self.stop_reason = f"{config.hours:g} hours are over"
            return True
        return False

    def _directions(self) -> list[Direction]:
        return [objective_direction(name) for name in self._config.objectives]

    def _beats(self, one: Suggestion, other: Suggestion) -> bool:
        signs = [1 if way == "minimize" else -1 for way in self._directions()]
        pairs = list(zip(signs, one.past.values, other.past.values, strict=True))
        worse = any(sign * mine > sign * theirs for sign, mine, theirs in pairs)
        return not worse and any(mine != theirs for _, mine, theirs in pairs)

    def _save(self) -> None:
        save_history(self._path, self._config, self.points, self.seconds)


def _first_message(error: Exception) -> str:
    if isinstance(error, ValidationError):
        item = error.errors(include_url=False)[0]
        rules = item.get("ctx", {}).get("rules")
        return " ".join(rules[0]) if rules else f"{'.'.join(map(str, item['loc']))} {item['msg']}"
    return str(error).splitlines()[0]
