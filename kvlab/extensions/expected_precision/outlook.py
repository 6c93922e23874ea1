"""What `kvlab plan` says of a sweep's precision: its design, and the spread that records show."""

import contextlib
import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvlab.analysis.sequential import has_taken_tests
from kvlab.analysis.trial_rows import Levels
from kvlab.cli.shared_arguments import project_path
from kvlab.errors import StoreError
from kvlab.extensions.expected_precision import design as designs
from kvlab.extensions.expected_precision.design import DesignPrecision
from kvlab.report.formatting import format_ends
from kvlab.store import Store
from kvlab.store.metrics import METRICS, collect_metrics
from kvlab.store.record_forms import refuse_malformed
from kvlab.sweep.planning.planner import Plan, PlannedTrial, Stage, plan_estimand

MAX_RESULTS_READ = 24
"""Results that a spread is taken from, and other sweeps that are searched for them: reading one
takes some milliseconds."""

_LEARNED = ("nats/token", "nats", "bits/byte", "")
"""Units of what differs between trainings. Memory does not, and times do for other reasons."""


@dataclass(frozen=True)
class RecordedSpread:
    """The spread between trainings of one cell, pooled over cells.

    Attributes:
        value: Standard deviation over seeds, in the metric's unit.
        sweep: Where they were recorded: a sweep of the store, or the folder of a report.
    """

    value: float
    trainings: int
    sweep: str


@dataclass(frozen=True)
class ExpectedPrecision:
    """How wide the intervals of a sweep will be.

    Attributes:
        design: What its claims can show.
        spread: What the store has of this sweep, or of another one of the same size, or a report;
            None if none has a cell with two trainings.
        has_taken_looks: Whether its looks cannot be declared otherwise any more.
    """

    sweep: str
    design: DesignPrecision
    spread: RecordedSpread | None
    metric: str
    margin: float | None
    has_taken_looks: bool

    def to_json(self) -> dict[str, Any]:
        design, vain = self.design, self.design.find_vain_looks()
        looks = [
            {"seeds": size, "t_bound": bound, "decides": size not in vain}
            for size, bound in design.look_bounds().items()
        ]
        return {
            "seeds": design.fewest_seeds,
            "half_widths_in_spreads": design.half_widths(),
            "spread": None if self.spread is None else asdict(self.spread),
            "seeds_within_margin": self._count_seeds(),
            "looks": looks,
            "looks_that_decide": list(design.propose_looks()) if design.looks else [],
        }

    def _count_seeds(self) -> int | None:
        """Return the number of seeds whose intervals are within the margin, if that is known."""
        if self.margin is None or self.spread is None or not self.design.weights:
            return None
        return self.design.count_seeds(self.margin / self.spread.value)

    def describe(self) -> Iterator[str]:
        """Yield lines for people."""
        if self.design.fewest_seeds == 1:
            yield "Precision: one seed shows no spread between trainings, so it decides nothing."
            return
        if self.design.weights:
            yield self._describe_widths()
        if self.design.find_vain_looks() and not self.has_taken_looks:
            yield self._describe_looks()

    def _describe_widths(self) -> str:
        """Say how far intervals reach, in spreads and in the metric's unit, and what margins do."""
        half_widths, margin, spread = self.design.half_widths().values(), self.margin, self.spread
        place = f"{'the last look, ' if self.design.looks else ''}{self.design.fewest_seeds} seeds"
        # no level is tested with less than the pooled error
        least = "at least" if len(half_widths) > 1 and not self.design.looks else "about"
        text = f"Precision: at {place}, intervals of trained levels reach {least}"
        times = format_ends(half_widths, _format_number)
        text += f" {times} times the spread between trainings of one cell."
        cheap, unit = f'"costs less than {margin or 0:g}"', METRICS[self.metric].unit
        if spread is None:
            if margin is not None:
                limit = f"{margin / max(half_widths):.2g} {unit}".rstrip()
                text += f" To show {cheap}, that spread must be below {limit}."
            return text
        where = "this sweep" if spread.sweep == self.sweep else spread.sweep
        reach = format_ends((width * spread.value for width in half_widths), _format_number)
        text += f" It is {spread.value:.2g} in {spread.trainings} trainings of {where}:"
        text += f" {least} {reach} {unit}".rstrip()
        if margin is None:
            return f"{text}."
        if max(half_widths) * spread.value <= margin:
            return f"{text}, within the margin of {margin:g}."
        count = self._count_seeds()
        seeds = f"{least} {count}" if count else f"more than {designs.MAX_SEEDS}"
        text += f", more than the margin of {margin:g}, so {cheap} is unlikely to be shown"
        return f"{text}; {seeds} seeds would."

    def _describe_looks(self) -> str:
        """Say from which |t| the looks that decide little call a level, and name better ones."""
        design = self.design
        calls = [
            f"|t| of {_format_number(bound)} at {size} seeds"
            for size, bound in design.find_vain_looks().items()
        ]
        text = f"Looks: a level is called only from {' and '.join(calls)}"
        text += ", so hardly any is decided there"
        looks = design.propose_looks()
        if not looks:
            return f"{text}, nor at any look before the last; write seeds: {design.looks[-1]}."
        bound = design.with_seeds(looks[-1], looks).look_bounds()[looks[0]]
        return f"{text}; looks: {list(looks)} calls from |t| of {_format_number(bound)}."


def _format_number(value: float) -> str:
    """Return two significant digits, or all before the point."""
    return f"{value:.2g}" if value < 100 else f"{value:,.0f}"


def describe_precision(
    stage: Stage, least: Plan, store: Store, _options: object
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return how precise a sweep will be as JSON and as lines, for `kvlab plan`."""
    found = expect_precision(stage, least, store, Path(project_path("reports")))
    return (None, []) if found is None else (found.to_json(), [*found.describe()])


def expect_precision(
    stage: Stage, least: Plan, store: Store, reports: Path
) -> ExpectedPrecision | None:
    """Return how precise a sweep will be.

    Args:
        least: From `kvlab.sweep.planning.stages.plan_at_least`: with the design's trials.
        reports: Folder of reports, which tell a spread where the record has none.

    Returns:
        None if nothing is left to run, or if the sweep claims nothing about what trainings learn,
        or decides a share of items.
    """
    sweep = stage.plan.sweep
    cells: dict[Levels, list[PlannedTrial]] = {}  # of the design, without those that tune it
    for one in least.trials:
        for levels in one.cells:
            if levels.keys() == sweep.factors.keys():
                key = tuple(levels[factor] for factor in sweep.factors)
                cells.setdefault(key, []).append(one)
    trials = [one for own in cells.values() for one in own]
    metric, decide = sweep.decide.metric, sweep.decide
    if metric is None:  # as in `kvlab.analysis.study.Study`
        served = any(one.trial.experiment.evaluation.served for one in trials)
        tokenizers = {one.trial.experiment.data.tokenizer for one in trials}
        metric = ("loss" if len(tokenizers) <= 1 else "bits_per_byte") + "_served" * served
    is_open = any(one.flops for one in trials) and not all(one.has_ended for one in least.trials)
    # of a share of items, the spread depends on the share that is yet to be measured
    is_learned = METRICS[metric].unit in _LEARNED and METRICS[metric].items is None
    if sweep.search is not None or not (sweep.claims and is_open and is_learned):
        return None
    estimand = plan_estimand(sweep, list(cells))
    trainings = {levels: own[0].trial.training_id for levels, own in cells.items()}
    looks: tuple[int, ...] = getattr(sweep.seeds, "looks", ())
    weights = designs.weigh_trainings(trainings, estimand, sweep.claims, metric)
    seeds = {levels: looks[-1] if looks else len(own) for levels, own in cells.items()}
    design = DesignPrecision(len(sweep.claims), weights, decide.alpha, seeds, looks)
    has_taken_looks = has_taken_tests(stage.record)
    spread = _find_spread(sweep.name, cells, metric, store)
    spread = spread or _find_reported_spread(trials, metric, reports)
    return ExpectedPrecision(sweep.name, design, spread, metric, decide.margin, has_taken_looks)


def _find_spread(
    sweep: str, cells: Mapping[Levels, list[PlannedTrial]], metric: str, store: Store
) -> RecordedSpread | None:
    """Return the spread in the record of this sweep, or else of one with models of its size."""
    done: dict[str, list[str]] = {}
    for own in cells.values():
        done.setdefault(own[0].trial.training_id, [p.trial.id for p in own if p.state == "done"])
    if found := _pool_results(store, done.values(), metric, lambda _: True):
        return RecordedSpread(*found, sweep)
    trials = [one for own in cells.values() for one in own]
    sizes = [one.parameters for one in trials]
    budgets = {one.trial.experiment.training.tokens for one in trials}
    tokenizers = {one.trial.experiment.data.tokenizer for one in trials}

    def is_alike(result: Mapping[str, Any]) -> bool:
        experiment = result["experiment"]
        return (
            min(sizes) <= result["model"]["parameters"] <= max(sizes)
            and experiment["training"]["tokens"] in budgets
            and experiment["data"]["tokenizer"] in tokenizers
        )

    names = sorted(store.sweep_names(), key=lambda name: (name != sweep, name))
    for name in names[:MAX_RESULTS_READ]:
        with contextlib.suppress(StoreError):
            recorded = [list(cell["trials"].values()) for cell in store.sweep(name)["cells"]]
            if found := _pool_results(store, recorded, metric, is_alike):
                return RecordedSpread(*found, name)
    return None


def _pool_results(
    store: Store,
    cells: Iterable[Sequence[str]],
    metric: str,
    is_alike: Callable[[Mapping[str, Any]], bool],
) -> tuple[float, int] | None:
    """Return the pooled spread of cells, given by their trials, and the number of trainings.

    Cells that share trainings count once. It gives up at the first trial that is not alike.
    """
    groups: dict[str, list[float]] = {}
    n_read = 0
    for trials in cells:
        values, training = [], ""
        for trial in trials[: MAX_RESULTS_READ - n_read] if len(trials) > 1 else ():
            result, n_read = store.result(trial), n_read + 1
            if result is None or result["status"] != "done":
                continue
            with refuse_malformed(trial):
                if not is_alike(result):
                    return None
                training = training or str(result["training"])
                values += [v for name, v in collect_metrics(result).items() if name == metric]
        groups.setdefault(training, values)
    return designs.pool_spread(list(groups.values()))


def _find_reported_spread(
    trials: Sequence[PlannedTrial], metric: str, reports: Path
) -> RecordedSpread | None:
    """Return the spread in the report with most trainings of models of a plan's sizes."""
    spreads = []
    sizes = {
        "model.parameters": [one.parameters for one in trials],
        "model.training_flops": [one.flops for one in trials],
    }
    for path in sorted(reports.glob("*/results.csv")):
        cells: dict[tuple[str, ...], dict[str, float]] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, csv.Error):
            with open(path, encoding="utf-8", newline="") as file:
                done = [row for row in csv.DictReader(file) if row["status"] == "done"]
            for row in done:
                is_other = (not min(n) <= float(row[key]) <= max(n) for key, n in sizes.items())
                if not row[f"measured.{metric}"] or any(is_other):
                    continue
                cell = tuple(text for name, text in row.items() if name.startswith("factor."))
                cells.setdefault(cell, {})[row["training"]] = float(row[f"measured.{metric}"])
            by_training = {min(own): [*own.values()] for own in reversed(cells.values())}
            if found := designs.pool_spread(list(by_training.values())):
                spreads.append(RecordedSpread(*found, f"{reports.name}/{path.parent.name}"))
    return max(spreads, key=lambda one: one.trainings, default=None)
