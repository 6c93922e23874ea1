"""A search: suggestions become cells, trials and results, and the history is on disk.

    <store>/sweeps/<name>/search.json    every suggestion, what became of it, and the time spent

Each suggestion is a level of one factor, ``point``, whose baseline is the base experiment; so a
search is recorded, mirrored and reported like any sweep.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import ValidationError

from kvlab.errors import SpecError, StoreError
from kvlab.files import read_json, write_json
from kvlab.spec.experiment import Experiment
from kvlab.spec.patch import apply_patch
from kvlab.spec.sweep import POINT, Cell
from kvlab.sweep.objectives import check_numbers, direction, known
from kvlab.sweep.plan import Identify, Plan, PlannedTrial, plan
from kvlab.sweep.suggest import Direction, Past, suggest
from kvlab.trial.record import Store

MOST_IN_VAIN = 200
"""Suggestions in a row that lead to no new trial, before the space counts as exhausted."""


@dataclass
class Point:
    """One suggestion: its patch of the base experiment, its trial if it has one."""

    past: Past
    level: str
    patch: dict[str, Any]
    trial: str = ""
    flops: int = 0
    why: str = ""

    @property
    def trained(self) -> bool:
        return bool(self.trial) and not self.why


class Search:
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
        identify: Identify | None = None,
    ):
        sweep = base.sweep
        assert sweep.search is not None, "only for sweeps with a search"
        check_numbers(sweep)
        self._sweep, self._config, self._store = sweep, sweep.search, store
        self._describe, self._identify = describe, identify
        self.plan = base
        self._path = store.sweep_directory(sweep.name) / "search.json"
        self._planned: dict[str, PlannedTrial] = {}
        self.points, self._spent = self._load()
        self._began = time.monotonic()
        self.ended_because = ""
        self._resumed = [point for point in self.points if point.past.state == "open"]
        for point in self.points:
            if point.trial:
                self._restore(point)

    def _restore(self, point: Point) -> None:
        planned = self._plan(point)
        if planned is None or planned.trial.id != point.trial:
            text = f"{self._path}: {point.level} is no longer what was run; its base or its text"
            raise StoreError(f"{text} has changed; give the sweep another name to search anew")

    def next(self) -> PlannedTrial | None:
        """The next suggestion that is a new trial; None while enough are in flight, or at the end
        (see ``ended_because``)."""
        if self._resumed:
            return self._planned[self._resumed.pop(0).trial]
        in_flight = sum(point.past.state == "open" for point in self.points)
        if in_flight >= self._config.parallel or self._is_over():
            return None
        for _ in range(MOST_IN_VAIN):
            planned = self._suggest()
            if planned is not None:
                return planned
        self.ended_because = f"the last {MOST_IN_VAIN} suggestions led to nothing new"
        return None

    def ended(self, planned: PlannedTrial, status: str) -> None:
        for point in self.points:
            if point.trial == planned.trial.id and point.past.state == "open":
                self._tell(point, status)
        self._save()

    def best(self) -> list[Point]:
        """The suggestions that no other one beats in all objectives, within the limits."""
        ok = [point for point in self.points if point.past.state == "ok" and point.trained]
        return [point for point in ok if not any(self._beats(other, point) for other in ok)]

    @property
    def seconds(self) -> float:
        """Time spent searching, over all runs."""
        return self._spent + time.monotonic() - self._began

    def _suggest(self) -> PlannedTrial | None:
        past = suggest(self._config, self._directions(), [point.past for point in self.points])
        patch = {
            key: self._config.choices[key][value] if key in self._config.choices else value
            for key, value in past.params.items()
        }
        point = Point(past, f"p{len(self.points) + 1:04d}", patch)
        self.points.append(point)
        planned = self._plan(point)
        if planned is None or not self._within(point, planned):
            self._save()
            return None
        point.trial, point.flops = planned.trial.id, planned.flops
        earlier = next((p for p in self.points[:-1] if p.trial == point.trial and p.trained), None)
        if earlier is not None:
            point.why = f"computes the same as {earlier.level}"
            if earlier.past.state != "open":
                point.past = replace(earlier.past, params=past.params, notes=past.notes)
        self._save()
        if point.why:
            return None
        self._store.write_sweep(self._describe(self.plan))
        return planned

    def _plan(self, point: Point) -> PlannedTrial | None:
        """The trial of a suggestion, which joins the plan; None if it is not possible."""
        self._sweep.factors[POINT][point.level] = point.patch
        try:
            data = apply_patch(self._sweep.source.base, self._sweep.patch(POINT, point.level))
            experiment = Experiment.model_validate(data)
        except (ValidationError, SpecError) as error:
            del self._sweep.factors[POINT][point.level]
            point.past.state, point.past.excess = "beyond", {"possible": 1.0}
            point.why = f"is not possible: {_first(error)}"
            return None
        cell = Cell({POINT: point.level}, experiment, self._sweep.seeds)
        found = plan(self._sweep, self._store, identify=self._identify, cells=(cell,))
        planned = found.trials[0]
        self._planned[planned.trial.id] = planned
        if not any(one.trial.id == planned.trial.id for one in self.plan.trials):
            self.plan = replace(self.plan, trials=(*self.plan.trials, planned))
        self.plan = replace(self.plan, cells=(*self.plan.cells, *found.cells))
        return planned

    def _within(self, point: Point, planned: PlannedTrial) -> bool:
        """Whether what is known beforehand keeps the limits."""
        point.past.excess = self._excess(known(planned))
        if any(excess > 0 for excess in point.past.excess.values()):
            point.past.state, point.why = "beyond", "is beyond a limit"
            self._leave_out(point)
            return False
        return True

    def _leave_out(self, point: Point) -> None:
        """A suggestion that is never run is no cell of the record."""
        del self._sweep.factors[POINT][point.level]
        kept = tuple(c for c in self.plan.cells if c.levels != {POINT: point.level})
        asked = {trial for cell in kept for trial in cell.trials.values()}
        trials = tuple(one for one in self.plan.trials if one.trial.id in asked)
        self.plan = replace(self.plan, cells=kept, trials=trials)

    def _tell(self, point: Point, status: str) -> None:
        planned = self._planned[point.trial]
        result = (self._store.result(point.trial) or {}) if status == "done" else {}
        found = {**known(planned), **result.get("measurements", {})}
        missing = [name for name in self._config.objectives if name not in found]
        if status == "diverged":
            point.past.state, point.past.excess = "beyond", {"diverged": 1.0}
        elif status != "done" or missing:
            point.past.state = "lost"
        else:
            point.past.values = [float(found[name]) for name in self._config.objectives]
            point.past.excess = self._excess(found)
            over = any(excess > 0 for excess in point.past.excess.values())
            point.past.state = "beyond" if over else "ok"

    def _excess(self, found: Mapping[str, float]) -> dict[str, float]:
        """By how much each limit is broken, relative to it; 0 or less keeps it."""
        excess = {}
        for name, limit in self._config.limits.items():
            if name in found:
                value = float(found[name])
                for bound, sign in ((limit.at_most, 1.0), (limit.at_least, -1.0)):
                    if bound is not None:
                        excess[f"{name} {sign:+g}"] = sign * (value - bound) / (abs(bound) or 1.0)
        return excess

    def _is_over(self) -> bool:
        config, trained = self._config, [point for point in self.points if point.trained]
        flops = sum(point.flops for point in trained)
        if config.trials is not None and len(trained) >= config.trials:
            self.ended_because = f"{len(trained):,} trials are the budget"
        elif config.flops is not None and flops >= config.flops:
            self.ended_because = f"{flops:.3g} of {config.flops:.3g} training FLOPs are spent"
        elif config.hours is not None and self.seconds >= 3600 * config.hours:
            self.ended_because = f"{config.hours:g} hours are over"
        return bool(self.ended_because)

    def _directions(self) -> list[Direction]:
        return [direction(name) for name in self._config.objectives]

    def _beats(self, one: Point, other: Point) -> bool:
        signs = [1 if way == "minimize" else -1 for way in self._directions()]
        pairs = list(zip(signs, one.past.values, other.past.values, strict=True))
        worse = any(sign * mine > sign * theirs for sign, mine, theirs in pairs)
        return not worse and any(mine != theirs for _, mine, theirs in pairs)

    def _save(self) -> None:
        points = [asdict(point) for point in self.points]
        write_json(
            self._path,
            {"schema": 1, "search": self._asked(), "seconds": self.seconds, "points": points},
        )

    def _asked(self) -> dict[str, Any]:
        """What suggestions depend on: a longer budget goes on with the same history."""
        asked = self._config.model_dump(mode="json")
        for budget in ("trials", "flops", "hours", "parallel"):
            del asked[budget]
        return asked

    def _load(self) -> tuple[list[Point], float]:
        try:
            found = read_json(self._path)
            if found["search"] != self._asked():
                text = f"{self._path} is the history of another search of this name"
                raise StoreError(f"{text}; give the sweep another name, or remove that file")
            points = [Point(**{**p, "past": Past(**p["past"])}) for p in found["points"]]
            return points, float(found["seconds"])
        except FileNotFoundError:
            return [], 0.0
        except (KeyError, TypeError) as error:
            text = f"{self._path} is damaged ({error})"
            raise StoreError(f"{text}; remove it to search anew, results stay") from None


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        item = error.errors(include_url=False)[0]
        rules = item.get("ctx", {}).get("rules")
        return " ".join(rules[0]) if rules else f"{'.'.join(map(str, item['loc']))} {item['msg']}"
    return str(error).splitlines()[0]
