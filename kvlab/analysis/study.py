"""`Study`: the rows of one sweep with the structure of its design; every section reads from it."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from statistics import fmean
from typing import Any

from kvlab.analysis import trial_rows
from kvlab.analysis.cell_comparisons import CellComparison, compare_cells, judge_gaps
from kvlab.analysis.divergence import find_wrong_trainings
from kvlab.analysis.effects import Effect, estimate_main_effects, is_learned
from kvlab.analysis.estimand import Estimand
from kvlab.analysis.interactions import estimate_interactions, tell_settings_apart
from kvlab.analysis.rankings import Ranking
from kvlab.analysis.search_results import BASE_LEVEL, SearchResults
from kvlab.analysis.sequential import SequentialTests, read_tests
from kvlab.analysis.standard_errors import SeedEffect, measure_seed_effect
from kvlab.analysis.statistics import Estimate, share_variance
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.errors import RecordDamaged, UsageError
from kvlab.humanize import format_count
from kvlab.own_extensions import find_needed
from kvlab.spec.decide_config import DecideConfig, list_claims
from kvlab.store import Store
from kvlab.store.metrics import METRICS
from kvlab.store.record_forms import read_record, refuse_malformed
from kvlab.store.timings import TIMINGS_FILE

BASELINE_LABEL = "baseline"

GAP_ROUNDING = 1e-4
"""A serving gap below it is float32 rounding, not an effect of the cache. Nats per token."""


class Study:
    """One sweep, as read from its record.

    Args:
        sections: Names of the report's sections, in order. Default: those that the sweep asks for.

    Attributes:
        factors: Factor -> levels, the baseline's first.
        rows: One row per cell and seed, in the design's order.
        cells: Cell -> rows by seed, in the design's order.
        sections: Names of the report's sections; None for all.
        search: What the search has found; None if the sweep is no search.
        sized_by: The factor whose levels are sizes of the model; None without `size`.
        claims: The claims that are tested together, as ``factor=level``.
        has_narrow_claims: Whether the sweep claims something of some levels alone.
    """

    def __init__(
        self,
        store: Store,
        sweep: Mapping[str, Any],
        rows: list[TrialRow],
        sections: Sequence[str] | None = None,
    ):
        self.store = store
        self.sweep = sweep
        self.factors = {name: tuple(levels) for name, levels in sweep["factors"].items()}
        self.baseline: Levels = tuple(sweep["baseline"][factor] for factor in self.factors)
        self.rows = rows
        self.cells: dict[Levels, dict[int, TrialRow]] = {}
        for row in rows:
            self.cells.setdefault(row.levels, {})[row.seed] = row
        self.search = SearchResults(sweep["search"]) if sweep.get("search") else None
        decided = {} if self.search is not None else dict(sweep.get("decide") or {})
        if not decided.get("claims"):  # a single cell, or a search: nothing is claimed
            decided.pop("claims", None)
        self.decide = DecideConfig.model_validate(decided)
        self.sized_by: str | None = (sweep.get("size") or {}).get("factor")
        self.claims = list_claims(self.decide, self.factors, sweep["baseline"], self.sized_by)
        every = list_claims(DecideConfig(), self.factors, sweep["baseline"], self.sized_by)
        self.has_narrow_claims = len(self.claims) < len(every)
        own_sections = tuple((sweep.get("report") or {}).get("sections") or ()) or None
        self.sections = own_sections if sections is None else tuple(sections)
        for method in (self.ranking, self.mean_effects, self.effects, self.interactions):
            setattr(self, method.__name__, cache(method))  # a metric is computed once

    @classmethod
    def load(cls, store: Store, name: str, sections: Sequence[str] | None = None) -> "Study":
        """Read a sweep's record.

        Raises:
            UsageError: The store has no such sweep, or an extension that is not installed has
                planned it, or has the metric that decides it.
            StoreError: The sweep's description is damaged.
        """
        sweep = store.sweep(name)
        declared = (sweep.get("stages") or {}).get("declared", {})
        if reason := find_needed({**declared, "sweep": declared}):
            raise UsageError(f"{name} {reason.removesuffix('; leave it out')}")
        with refuse_malformed(name):
            study = cls(store, sweep, trial_rows.read_rows(store, sweep), sections)
            if (metric := study.primary_metric) not in METRICS:
                used = (row.record["experiment"] for row in study.done_rows)
                reason = next(filter(None, map(find_needed, used)), "is no metric")
                reason = reason.removesuffix("; leave it out")
                raise UsageError(f"{name} is decided by {metric}, which {reason}")
            return study

    @property
    def name(self) -> str:
        return str(self.sweep["name"])

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({row.seed for row in self.rows}))

    @cached_property
    def seeds_of_a_cell(self) -> str:
        """The number of seeds of a cell in words; the fewest and the most where cells differ."""
        counts = sorted({len(by_seed) for by_seed in self.cells.values()}) or [0]
        fewest = f"{counts[0]} to " if counts[1:] else ""
        return fewest + format_count(counts[-1], "seed")

    @cached_property
    def tests(self) -> SequentialTests | None:
        """What tests the claims while the sweep gets seeds; None if they are tested once."""
        return read_tests(self.sweep)

    @cached_property
    def damaged_files(self) -> tuple[str, ...]:
        """The sweep's own files, beside its description, that are not what was written."""
        folder, damaged = self.store.sweep_directory(self.name), []
        for path in (folder / TIMINGS_FILE, folder / "reported.json", folder / "search.json"):
            try:
                read_record(path)
            except FileNotFoundError:
                continue
            except RecordDamaged:
                damaged.append(path.name)
        return tuple(damaged)

    @cached_property
    def done_rows(self) -> tuple[TrialRow, ...]:
        return tuple(row for row in self.rows if row.is_done)

    @cached_property
    def other_code(self) -> tuple[TrialRow, ...]:
        """The trials that ran other code than most, each once. Trials that do not say are none."""
        rows = {row.trial: row for row in self.rows if row.code and row.status != "failed"}
        usual = Counter(row.code for row in rows.values()).most_common(1)
        return tuple(row for row in rows.values() if row.code != usual[0][0])

    @cached_property
    def is_untrained(self) -> bool:
        """Whether all weights are as initialized, so that losses mean nothing."""
        trainings = [row.record["experiment"].get("training", {}) for row in self.done_rows]
        untrained = (one.get("tokens") == 0 and one.get("init_from") is None for one in trainings)
        return bool(trainings) and all(untrained)

    @cached_property
    def is_given(self) -> bool:
        """Whether all weights are those of checkpoints, and nothing was trained."""
        trainings = [row.record["experiment"].get("training", {}) for row in self.done_rows]
        given = (one.get("tokens") == 0 and isinstance(one.get("init_from"), str)
                 for one in trainings)  # fmt: skip
        return bool(trainings) and all(given)

    @cached_property
    def status_counts(self) -> Counter[str]:
        return Counter(row.status for row in self.rows)

    @property
    def undeclared_looks(self) -> list[int]:
        """The numbers of seeds at which a report was written before seeds were added."""
        before = {len(seeds) for seeds in self.sweep.get("reported_seeds", ())}
        return sorted(size for size in before if 1 < size < len(self.seeds))

    @cached_property
    def measured_metrics(self) -> tuple[str, ...]:
        """The metrics that any trial has, in the order of the table of metrics."""
        return METRICS.sort(name for row in self.done_rows for name in row.measurements)

    @cached_property
    def primary_metric(self) -> str:
        """The metric that conclusions are drawn from: that of `decide`, if the sweep names one.

        Else the loss through the serving cache, since one-shot scoring cannot see what serving
        does to quality. If cells differ in tokenizer it is bits per byte, since their losses
        count different tokens. Of a search it is the first objective that is a metric.
        """
        for objective in self.search.objectives if self.search is not None else ():
            if objective.name in METRICS:
                return objective.name
        if self.decide.metric is not None:
            return self.decide.metric
        served = "_served" if "loss_served" in self.measured_metrics else ""
        has_one_tokenizer = len(self.tokenizers) <= 1
        return ("loss" if has_one_tokenizer else "bits_per_byte") + served

    @cached_property
    def one_shot_metric(self) -> str:
        """The one-shot form of `primary_metric`, over the same text."""
        one_shot = self.primary_metric.removesuffix("_served")
        is_served = one_shot != self.primary_metric
        return f"{one_shot}_paired" if is_served and f"{one_shot}_paired" in METRICS else one_shot

    @cached_property
    def tokenizers(self) -> frozenset[str]:
        experiments = [row.record["experiment"] for row in self.done_rows]
        return frozenset(str(experiment["data"]["tokenizer"]) for experiment in experiments)

    def values(self, levels: Levels, metric: str) -> dict[int, float]:
        """Return a cell's values of a metric by seed, of the trials that are done and have it."""
        return {
            seed: row.measurements[metric]
            for seed, row in self.cells.get(levels, {}).items()
            if row.is_done and metric in row.measurements
        }

    def mean(self, levels: Levels, metric: str) -> float | None:
        """Return a cell's mean over seeds."""
        values = self.values(levels, metric)
        return math.fsum(values.values()) / len(values) if values else None

    def means(self, metric: str) -> dict[Levels, float]:
        """Return the mean over seeds of every cell that has the metric."""
        means = ((levels, self.mean(levels, metric)) for levels in self.cells)
        return {levels: mean for levels, mean in means if mean is not None}

    def kv_bytes(self, levels: Levels) -> int | None:
        """Return the exact bytes of one sequence's cache at block size; equal at every seed."""
        return self._find_recorded(levels, "kv", "bytes_at_block_size")

    def size_factor(self, levels: Levels) -> float | None:
        """Return by how much a cell's cache is smaller than its reference's; None if unknown."""
        own, other = self.kv_bytes(levels), self.kv_bytes(self.estimand.reference(levels))
        return other / own if own and other else None

    def block_size(self, levels: Levels) -> int | None:
        """Return a cell's longest sequence, in tokens; equal at every seed."""
        return self._find_recorded(levels, "experiment", "model", "block_size")

    def parameters(self, levels: Levels) -> int | None:
        """Return the number of parameters of a cell's model; equal at every seed."""
        return self._find_recorded(levels, "model", "parameters")

    def _find_recorded(self, levels: Levels, *keys: str) -> int | None:
        """Return a number that is equal at every seed; None if no trial of a cell has it."""
        for row in self.cells.get(levels, {}).values():
            value: Any = row.record
            for key in keys:
                value = (value or {}).get(key)
            if value is not None:
                return int(value)
        return None

    @property
    def match_mode(self) -> str:
        """What every cell has as much of as the baseline; ``none`` if sizes were not matched."""
        return str(self.sweep.get("match", ("none",))[0])

    @cached_property
    def diverged_cells(self) -> dict[Levels, int]:
        """Cells any of whose trials diverged, with the number of these trials.

        The other trials flatter such a cell: it is never the best, whatever their mean.
        """
        counts = Counter(row.levels for row in self.rows if row.status == "diverged")
        return {levels: counts[levels] for levels in self.cells if levels in counts}

    def ranking(self, metric: str) -> Ranking:
        """Return the ranking of all cells in a metric, with those that diverged."""
        info, of_items = METRICS[metric], None
        if info.items is not None:
            of_items = {
                levels: fmean(
                    share_variance(row.measurements[metric], row.measurements[info.items])
                    for row in rows.values()
                    if row.is_done and {metric, info.items} <= row.measurements.keys()
                )
                for levels, rows in self.cells.items()
                if self.values(levels, metric)
            }
        return Ranking(
            {levels: self.values(levels, metric) for levels in self.cells},
            self.baseline,
            {c: {row.training for row in rows.values()} for c, rows in self.cells.items()},
            noisy=[c for c in self.cells if self.estimand.is_served_otherwise(c)],
            higher_is_better=info.better == "higher",
            in_steps=info.is_share,
            alpha=self.decide.alpha,
            all_seeds=self.estimand.all_seeds,
            item_variances=of_items,
        )

    def ranked_means(self, metric: str) -> dict[Levels, float]:
        """Return the means by which cells are ranked, without the cells that diverged."""
        means = self.ranking(metric).means
        return {levels: mean for levels, mean in means.items() if levels not in self.diverged_cells}

    @cached_property
    def estimand(self) -> Estimand:
        """Which cells enter means over settings, and what each cell is compared with."""
        sizes = {levels: self.kv_bytes(levels) for levels in self.cells}
        kept = list(self.decide.reference or ())
        if self.sized_by is not None:
            kept.append(self.sized_by)
        return Estimand(
            tuple(self.cells),
            self.factors,
            self.sweep.get("patches") or {},
            {levels: size for levels, size in sizes.items() if size is not None},
            kept,
            self.decide.over or {},
            all_seeds=self.tests is None,
        )

    @cached_property
    def comparisons(self) -> dict[Levels, CellComparison]:
        """Every cell against its reference in the primary metric, judged together."""
        return compare_cells(self)

    def trained_tokens(self, levels: Levels) -> int | None:
        """Return the tokens that a cell's weights were trained on, with those that it started from.

        None if no trial of it has ended.
        """
        named = dict(zip(self.factors, levels, strict=True))
        patches: Mapping[str, Any] = self.sweep.get("patches") or {}
        before = 0
        # not as the record has it: another sweep, with other factors, may have run the trial
        for factor, level in named.items():
            source = patches.get(factor, {}).get(level, {}).get("training.init_from")
            if isinstance(source, Mapping):
                before = self.trained_tokens(tuple({**named, **source}.values())) or 0
        own = self._find_recorded(levels, "experiment", "training", "tokens")
        return None if own is None else before + own

    @cached_property
    def seed_effect(self) -> SeedEffect | None:
        """What seeds explain of the primary metric, over the cells served as they were trained."""
        cells = [levels for levels in self.cells if self.estimand.enters_means(levels)]
        values = [self.values(levels, self.primary_metric) for levels in cells]
        return measure_seed_effect([by_seed for by_seed in values if by_seed])

    @cached_property
    def scores_parts(self) -> bool:
        """Whether every seed has scored a text of its own (`evaluation.text_parts`)."""
        scored = [row.record["experiment"].get("evaluation", {}) for row in self.done_rows]
        return bool(scored) and all(one.get("text_parts") for one in scored)

    @cached_property
    def wrong_trainings(self) -> dict[str, float]:
        """The trainings that went wrong, by id; see `kvlab.analysis.divergence`."""
        if self.search is not None or self.scores_parts:  # texts differ in how hard they are
            return {}
        metric = self.primary_metric
        share = metric.removesuffix("_served") if METRICS[metric].is_share else None
        return find_wrong_trainings(self.cells, share, self.decide.margin or 0.0)

    @cached_property
    def without_wrong(self) -> "Study":
        """The same study without the trainings that went wrong, judged as if they never ran.

        Its `tests` are forgotten: they have judged these trainings, too.
        """
        rows = [row for row in self.rows if row.training not in self.wrong_trainings]
        kept = {key: value for key, value in self.sweep.items() if key != "stages"}
        study = Study(self.store, kept, rows, self.sections)
        study.estimand = replace(study.estimand, all_seeds=self.estimand.all_seeds)
        return study

    def count_wrong(self, cells: Iterable[Levels]) -> int:
        """Return how many trainings of some cells went wrong."""
        rows = (row for levels in cells for row in self.cells[levels].values())
        return len({row.training for row in rows}.intersection(self.wrong_trainings))

    @cached_property
    def timing_obstacle(self) -> str:
        """Why the times of different cells do not compare; empty if they do."""
        return trial_rows.describe_timing_obstacle(self.cells, self.baseline)

    @cached_property
    def _training_obstacle(self) -> str:
        """Why the rates of trainings do not compare; they are not taken again."""
        cells: dict[Levels, dict[int, TrialRow]] = {levels: {} for levels in self.cells}
        for row in self.rows:
            first = {key: value for key, value in row.record.items() if key != "timing"}
            cells[row.levels][row.seed] = replace(row, record=first)
        return trial_rows.describe_timing_obstacle(cells, self.baseline)

    def is_disturbed(self, metric: str) -> bool:
        """Whether a metric is a time, and times do not compare here."""
        if trial_rows.is_training_rate(metric):
            return bool(self._training_obstacle)
        return trial_rows.is_time(metric) and bool(self.timing_obstacle)

    @cached_property
    def serving_gaps(self) -> dict[Levels, Estimate]:
        """Every cell's serving gap over its trainings, tested for all cells together."""
        values = {levels: self.values(levels, "serving_gap") for levels in self.cells}
        measured = {levels: gaps for levels, gaps in values.items() if gaps}
        judged = judge_gaps(list(measured.values()), self.decide.alpha, GAP_ROUNDING, self.tests)
        return dict(zip(measured, judged, strict=True))

    def mean_effects(self, metric: str) -> list[Effect]:
        """Return every level's mean effect over settings, without the judgement of `tests`.

        Times that do not compare are not judged.
        """
        is_decided = metric == self.primary_metric
        effects = estimate_main_effects(
            self.cells,
            self.estimand,
            metric,
            claims=self.claims if is_decided else None,
            alpha=self.decide.alpha,
            margin=self.decide.margin if is_decided else None,
        )
        return self._mark(effects)

    def effects(self, metric: str) -> list[Effect]:
        """Return every level's difference from its factor's baseline level, judged together.

        A level whose settings disagree has an effect for each kind of setting. In the decided
        metric, `tests` have judged it if there are any.
        """
        means, together = self.mean_effects(metric), self.interactions(metric)
        if metric == self.primary_metric and self.tests is not None:
            judged = self.tests.judge(self, means, together)
        else:
            judged = tell_settings_apart(self.cells, means, together, self.estimand)
        return self._mark(judged)

    def interactions(self, metric: str) -> list[Effect]:
        """Return what every two levels do together beyond the sum of each, judged together."""
        effects = estimate_interactions(
            self.cells,
            self.estimand,
            metric,
            alpha=self.decide.alpha,
            margin=self.decide.margin if metric == self.primary_metric else None,
        )
        return self._mark(effects)

    def _mark(self, effects: list[Effect]) -> list[Effect]:
        """Mark differences of times that do not compare, and trainings that went wrong."""
        marked = []
        for one in effects:
            # a level of serving uses the same trainings as its baseline
            is_trained = not self.estimand.changes_serving_alone(one.change[:1])
            wrong = self.count_wrong(one.weights) if is_trained and is_learned(one.metric) else 0
            disturbed = self.is_disturbed(one.metric)
            marked.append(replace(one, is_disturbed=disturbed, went_wrong=wrong))
        return marked

    @cached_property
    def _ambiguous_levels(self) -> frozenset[str]:
        """Level names that several factors use."""
        counts = Counter(level for levels in self.factors.values() for level in levels)
        return frozenset(level for level, count in counts.items() if count > 1)

    def label(self, levels: Levels) -> str:
        """Return a cell's short name: its levels that are not the baseline's, joined by ``+``.

        The suggestions of a search are named by their number, and the base experiment ``base``.
        """
        if self.search is not None:
            suggestion = self.search.by_level.get(levels[0])
            return BASE_LEVEL if suggestion is None else f"trial {suggestion.number}"
        changed = [
            f"{factor}={level}" if level in self._ambiguous_levels else level
            for factor, level, base in zip(self.factors, levels, self.baseline, strict=True)
            if level != base
        ]
        return "+".join(changed) or BASELINE_LABEL

    def n_changed_factors(self, levels: Levels) -> int:
        """Return the number of factors in which a cell differs from the baseline."""
        return sum(level != base for level, base in zip(levels, self.baseline, strict=True))

    def cell_key(self, levels: Levels) -> str:
        """Return the key by which figures and tables refer to a cell."""
        return f"c{self._indices[levels]}"

    def cell_index(self, levels: Levels) -> int:
        return self._indices[levels]

    @cached_property
    def _indices(self) -> dict[Levels, int]:
        return {levels: number for number, levels in enumerate(self.cells)}

    def change_key(self, change: Iterable[tuple[str, str]]) -> str:
        """Return the key by which rows and marks about a change of levels are selected.

        It is the key of the cell that differs from the baseline in these levels alone, or a key of
        its own if the design has no such cell.
        """
        new = dict(change)
        pairs = zip(self.factors, self.baseline, strict=True)
        levels = tuple(new.get(factor, base) for factor, base in pairs)
        named = "+".join(f"{factor}={level}" for factor, level in new.items())
        return self.cell_key(levels) if levels in self._indices else named
