"""List the quantities of a sweep that reports print: what each is, and the trials it is made of.

Every number that a trial has recorded, means over seeds, paired differences, effects, interactions
and their intervals. Each has a formula in words, and weighted sums have their terms with their
weights, so that a reader can compute them again.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvlab.analysis.effects import Effect
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, TrialRow, is_time
from kvlab.humanize import format_count, format_number
from kvlab.report.formatting import (
    TIMES,
    difference_unit,
    display_unit,
    format_difference,
    format_metric,
    format_p_value,
    format_ratio,
    format_significant,
    in_display_unit,
)
from kvlab.report.printed_numbers import byte_texts, read_unit
from kvlab.report.sections.main_effects import judge_other_metrics
from kvlab.report.table_columns import MAX_LISTED_SEEDS, mean_and_spread
from kvlab.store.metrics import METRICS


@dataclass(frozen=True)
class Term:
    """One trial of a quantity.

    Attributes:
        weight: Its weight at its seed; None if the quantity is no weighted sum.
        value: Its value, in the unit of the quantity; None if it is not read alone.
    """

    row: TrialRow
    weight: float | None = None
    value: float | None = None


@dataclass(frozen=True)
class Origin:
    """A quantity that prints as a number.

    Attributes:
        title: What it is.
        texts: How it is printed.
        value: Its value, unrounded.
        unit: The unit of ``value`` and of its terms.
        formula: How it is computed, in words.
        terms: The trials that it is made of.
        keys: Keys of the report's rows that it belongs to.
        places: Where it stands in the report.
    """

    title: str
    texts: tuple[str, ...]
    value: float
    unit: str
    formula: str
    terms: tuple[Term, ...]
    keys: frozenset[str] = frozenset()
    places: tuple[str, ...] = ()

    @property
    def is_weighted(self) -> bool:
        """Whether `recompute` applies."""
        return bool(self.terms) and all(term.weight is not None for term in self.terms)

    def sums_by_seed(self) -> dict[int, float]:
        """Return the weighted sum of the terms at every seed."""
        sums: dict[int, float] = {}
        for term in self.terms:
            assert term.weight is not None, "only weighted sums are computed again"
            assert term.value is not None, "a weighted term has a value"
            sums[term.row.seed] = sums.get(term.row.seed, 0.0) + term.weight * term.value
        return sums

    def recompute(self) -> float:
        """Return the mean over seeds of `sums_by_seed`."""
        sums = self.sums_by_seed().values()
        return math.fsum(sums) / len(sums)


@dataclass(frozen=True)
class Quantity:
    """A value, and how to describe it; most are only compared.

    Attributes:
        value: In ``unit``.
        describe: Returns its origin.
    """

    value: float
    unit: str
    describe: Callable[[], Origin]


def list_quantities(study: Study) -> Iterator[Quantity]:
    """Yield the quantities of a sweep: what its trials recorded, and what is computed from it."""
    quantities = _Quantities(study)
    yield from quantities.list_recorded()
    if study.search is None:
        yield from quantities.list_cells()
        yield from quantities.list_effects()


class _Quantities:
    def __init__(self, study: Study):
        self.study = study

    # Values of the record

    def list_recorded(self) -> Iterator[Quantity]:
        """Yield what trials recorded; what is equal at several seeds of a cell is one origin."""
        seen: set[str] = set()
        for levels, by_seed in self.study.cells.items():
            values: dict[tuple[str, str, float], list[TrialRow]] = {}
            for row in by_seed.values():
                if row.trial not in seen:  # several cells may have one trial
                    for key in _list_values(row):
                        values.setdefault(key, []).append(row)
            seen |= {row.trial for row in by_seed.values()}
            names: dict[tuple[str, float, tuple[int, ...]], list[tuple[str, str]]] = {}
            for (name, unit, value), rows in values.items():
                seeds = tuple(row.seed for row in rows)
                kind = read_unit(METRICS[name].unit if name in METRICS else unit)
                names.setdefault((kind, value, seeds), []).append((name, unit))
            for (_, value, seeds), equal in names.items():
                yield from self.list_value(levels, equal, value, [by_seed[seed] for seed in seeds])

    def list_value(
        self,
        levels: Levels,
        equal: Sequence[tuple[str, str]],
        value: float,
        rows: Sequence[TrialRow],
    ) -> Iterator[Quantity]:
        """Yield a value that trials of a cell recorded, under one name or several."""
        name, unit = equal[0]
        is_metric = name in METRICS
        shown = in_display_unit(name, value) if is_metric else value
        shown_unit = display_unit(name) if is_metric else unit

        def make() -> Origin:
            what = f"{METRICS[name].title} ({name})" if is_metric else name
            title = f"{what} of {self.name_rows(levels, rows)}"
            terms = tuple(Term(row, None, shown) for row in rows)
            formula = _describe_record(name, rows)
            if len(equal) > 1:
                formula += f"; equal: {', '.join(other for other, _ in equal[1:])}"
            texts = _value_texts(name, shown_unit, value)
            return Origin(title, texts, shown, shown_unit, formula, terms, self.key(levels))

        yield Quantity(shown, shown_unit, make)

    def name_rows(self, levels: Levels, rows: Sequence[TrialRow]) -> str:
        seeds = f"seed{'s' if len(rows) > 1 else ''} {', '.join(str(row.seed) for row in rows)}"
        seeds = seeds if len(rows) <= MAX_LISTED_SEEDS else f"{len(rows)} seeds"
        return f"{self.study.label(levels)} at {seeds}"

    def key(self, *cells: Levels) -> frozenset[str]:
        return frozenset(self.study.cell_key(levels) for levels in cells)

    # Numbers of cells

    def list_cells(self) -> Iterator[Quantity]:
        study = self.study
        for levels in study.cells:
            for metric in study.measured_metrics:
                values = study.values(levels, metric)
                if len(set(values.values())) > 1 and not _is_repeated(study, levels, metric):
                    yield from self.list_mean(levels, metric, values)
            stored, base = study.kv_bytes(levels), study.kv_bytes(study.baseline)
            if stored and base:
                yield from self.list_ratio(levels, base / stored)
            if levels != study.baseline and levels in study.cell_differences:
                yield from self.list_difference(levels)

    def list_mean(
        self, levels: Levels, metric: str, values: Mapping[int, float]
    ) -> Iterator[Quantity]:
        mean, spread = mean_and_spread(list(values.values()))
        study = self.study
        label, info = study.label(levels), METRICS[metric]
        seeds = format_count(len(values), "seed")

        def make(value: float, what: str, formula: str, is_mean: bool) -> Origin:
            terms = self.terms({levels: 1.0}, values, metric)
            if not is_mean:
                terms = tuple(replace(term, weight=None) for term in terms)
            texts = (format_metric(metric, value), format_difference(metric, value))
            unit, shown = display_unit(metric), in_display_unit(metric, value)
            title = f"{what} of the {info.title} ({metric}) of {label}"
            return Origin(title, texts, shown, unit, formula, terms, self.key(levels))

        shown, unit = in_display_unit(metric, mean), display_unit(metric)
        source = _describe_record(metric, study.cells[levels].values())
        words = f"the mean of the values at {seeds}; each {source}"
        yield Quantity(shown, unit, lambda: make(mean, "mean", words, True))
        if spread is not None:
            sd, shown = spread, in_display_unit(metric, spread)
            of = f"the standard deviation of the values at {seeds}, with n - 1"
            yield Quantity(shown, unit, lambda: make(sd, "standard deviation", of, False))

    def list_ratio(self, levels: Levels, ratio: float) -> Iterator[Quantity]:
        study = self.study

        def make() -> Origin:
            rows = [_first(study.cells[one]) for one in dict.fromkeys((study.baseline, levels))]
            terms = tuple(Term(row, None, row.record["kv"]["bytes_at_block_size"]) for row in rows)
            title = f"K/V bytes of the baseline over those of {study.label(levels)}"
            formula = "kv.bytes_at_block_size of the baseline over that of the cell, equal at every"
            texts, keys = (format_ratio(ratio),), self.key(levels)
            return Origin(title, texts, ratio, TIMES, f"{formula} seed", terms, keys)

        yield Quantity(ratio, TIMES, make)

    def list_difference(self, levels: Levels) -> Iterator[Quantity]:
        """Yield a cell's difference from the baseline, and the ends of its interval."""
        study, metric = self.study, self.study.primary_metric
        found, base = study.cell_differences[levels], study.baseline
        shared = study.values(levels, metric).keys() & study.values(base, metric).keys()
        if levels in study.cell_effects or not shared:
            return  # yielded as the effect of a level; or compared by way of another cell
        weights, label = {levels: 1.0, base: -1.0}, study.label(levels)
        formula = (
            f"at each seed, {label} minus {study.label(base)}; then the mean over"
            f" {format_count(len(shared), 'seed')}"
        )
        title = f"{METRICS[metric].title} ({metric}) of {label} minus the baseline's"
        yield from self.list_weighted(metric, found.value, title, formula, weights, shared)
        ends = study.cell_interval(levels)
        if ends is not None:
            error = f"standard error {found.standard_error:.4g}, {found.df} degrees of freedom"
            scope = f"{100 * (1 - study.decide.alpha):g}% for all cells together; {error}"
            yield from self.list_ends(metric, found.value, ends, title, scope, weights, shared)

    # Effects

    def list_effects(self) -> Iterator[Quantity]:
        study = self.study
        metric = study.primary_metric
        families = {
            "all levels": study.effects(metric),
            "all levels and these other measurements": judge_other_metrics(study),
            "all interactions": study.interactions(metric),
        }
        for family, effects in families.items():
            for effect in effects:
                if effect.estimate is not None:
                    yield from self.list_effect(effect, family)

    def list_effect(self, effect: Effect, family: str) -> Iterator[Quantity]:
        metric, seeds = effect.metric, dict(effect.by_seed)
        kind = "effect" if len(effect.change) == 1 else "interaction"
        title = f"{kind} of {effect.name} on the {METRICS[metric].title} ({metric})"
        formula = f"{_describe_effect(self.study, effect)}; then the mean over"
        formula = f"{formula} {format_count(len(seeds), 'seed')}"
        yield from self.list_weighted(
            metric, effect.value, title, formula, effect.weights, seeds, effect
        )
        for seed, value in seeds.items():
            at_seed = f"{title}, at seed {seed}"
            words = _describe_effect(self.study, effect)
            yield from self.list_weighted(
                metric, value, at_seed, words, effect.weights, {seed}, effect
            )
        yield from self.list_settings(effect, title)
        if not effect.is_tested:
            return
        error = effect.tested_error
        kind = "pooled over the levels that change training" if error.is_pooled else "its own"
        words = f"standard error {error.value:.4g} ({kind}), {error.df:.3g} degrees of freedom"
        if effect.has_interval:
            scope = f"{100 * (1 - effect.alpha):g}% for {family} together; {words}"
            ends = (effect.low, effect.high)
            yield from self.list_ends(
                metric, effect.value, ends, title, scope, effect.weights, seeds
            )
            p = effect.corrected_p
            terms = self.terms(effect.weights, seeds, metric)
            terms = tuple(replace(term, weight=None) for term in terms)
            test = f"difference {effect.value:.4g} over its error: {words}; corrected for {family}"
            origin = Origin(
                f"p of the {title}", (format_p_value(p),), p, "", test, terms, self.keys_of(effect)
            )
            yield Quantity(p, "", lambda: origin)

    def list_settings(self, effect: Effect, title: str) -> Iterator[Quantity]:
        """Yield what a level does in every setting of the other factors."""
        if len(effect.change) > 1 or effect.settings < 2:
            return
        factor, level = effect.change[0]
        index, base = list(self.study.factors).index(factor), self.study.factors[factor][0]
        for others, value in effect.by_setting:
            cell, partner = ((*others[:index], one, *others[index:]) for one in (level, base))
            label, beside = self.study.label(cell), self.study.label(partner)
            words = f"at each seed, {label} minus {beside}; then the mean over the seeds"
            weights, setting = {cell: 1.0, partner: -1.0}, f"{title}, in the setting of {label}"
            yield from self.list_weighted(
                effect.metric, value, setting, words, weights, effect.seeds, effect
            )

    def keys_of(self, effect: Effect) -> frozenset[str]:
        return frozenset((self.study.change_key(effect.change),))

    def list_weighted(
        self,
        metric: str,
        value: float,
        title: str,
        formula: str,
        weights: Mapping[Levels, float],
        seeds: Iterable[int],
        effect: Effect | None = None,
    ) -> Iterator[Quantity]:
        """Yield the mean over seeds of a weighted sum of cells."""
        shown, unit = in_display_unit(metric, value), difference_unit(metric)

        def make() -> Origin:
            texts = (format_difference(metric, value), format_metric(metric, value))
            keys = self.key(*(levels for levels, weight in weights.items() if weight > 0))
            keys = self.keys_of(effect) | keys if effect is not None else keys
            terms = self.terms(weights, seeds, metric)
            return Origin(title, texts, shown, unit, formula, terms, keys)

        yield Quantity(shown, unit, make)

    def list_ends(
        self,
        metric: str,
        value: float,
        ends: tuple[float, float],
        title: str,
        scope: str,
        weights: Mapping[Levels, float],
        seeds: Iterable[int],
    ) -> Iterator[Quantity]:
        """Yield both ends of a simultaneous interval."""
        for name, end in zip(("lower", "upper"), ends, strict=True):

            def make(name: str = name, end: float = end) -> Origin:
                terms = self.terms(weights, seeds, metric)
                terms = tuple(replace(term, weight=None) for term in terms)
                about = f"{name} end of the simultaneous interval: {title}"
                middle = f"{format_difference(metric, value)} {difference_unit(metric)}".strip()
                words = f"around the difference {middle}, {scope}"
                if end == 0.0:
                    words += "; a later step of the correction finds a difference, so it ends at 0"
                keys = self.key(*(levels for levels, weight in weights.items() if weight > 0))
                texts, shown = (format_difference(metric, end),), in_display_unit(metric, end)
                return Origin(about, texts, shown, difference_unit(metric), words, terms, keys)

            yield Quantity(in_display_unit(metric, end), difference_unit(metric), make)

    def terms(
        self, weights: Mapping[Levels, float], seeds: Iterable[int], metric: str
    ) -> tuple[Term, ...]:
        cells, found = self.study.cells, []
        for seed in sorted(seeds):
            for levels, weight in weights.items():
                row = cells[levels].get(seed)
                if row is not None and metric in row.measurements:
                    value = in_display_unit(metric, row.measurements[metric])
                    found.append(Term(row, weight, value))
        return tuple(found)


def _list_values(row: TrialRow) -> Iterator[tuple[str, str, float]]:
    """Yield name, unit and value of every number that a trial recorded."""
    for name, value in row.measurements.items():
        if value != row.measurements.get(name.removesuffix("_paired")) or "_paired" not in name:
            yield name, "", value
    record = row.record
    for part in ("kv", "model", "training_record"):
        for key, value in record.get(part, {}).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                unit = "B" if "bytes" in key else "s" if key == "seconds" else ""
                yield f"{part}.{key}", unit, value
    known = set(row.measurements.values())
    for part in ("benchmark", "needle"):
        for line in record.get(part, ()):
            value = line.get("value")
            if isinstance(value, int | float) and value not in known:
                facts = (f"{k} {v}" for k, v in line.items() if k in _LINE_KEYS)
                yield f"{part} line ({', '.join(facts)})", str(line.get("unit", "")), value
    for step, _, loss in row.curve:
        yield f"validation loss during training, after step {step:g}", "nats/token", loss


_LINE_KEYS = ("part", "metric", "batch_size", "context_length", "cached", "length", "depth")
"""Keys of a line that tell it from the others."""


def _is_repeated(study: Study, levels: Levels, metric: str) -> bool:
    """Return whether a paired loss is the one-shot loss, as all of its text was scored."""
    base = metric.removesuffix("_paired")
    return base != metric and study.values(levels, base) == study.values(levels, metric)


def _describe_record(name: str, rows: Iterable[TrialRow]) -> str:
    """Say where in the record the values of trials are."""
    if name in METRICS:
        timing = next((row.record["timing"] for row in rows if "timing" in row.record), None)
        if timing is not None and is_time(name) and not name.startswith("training_"):
            when = f"{timing['started']} to {timing['finished']}, alone and in turns"
            return f"{name}, timed again {when}: timings.json of the sweep, not result.json"
        if METRICS[name].derive is not None:
            return f"{name}, computed from other measurements of the trial, each in result.json"
        return f"measurements.{name} in the trial's result.json"
    return f"{name.partition(' ')[0]}: in the trial's result.json"


def _value_texts(name: str, unit: str, value: float) -> tuple[str, ...]:
    """Return how reports and the terminal print a recorded value."""
    if name in METRICS:
        texts = (format_metric(name, value), format_difference(name, value))
        return (*texts, *byte_texts(value)) if unit == "bytes" else texts
    if unit in ("B", "bytes"):
        return byte_texts(value)
    whole = (f"{value:,}",) if isinstance(value, int) else ()
    texts = (*whole, format_significant(value), format_number(value))
    return (f"{value:.4f}", *texts) if unit == "nats/token" else texts


def _describe_effect(study: Study, effect: Effect) -> str:
    if effect.is_contrast:
        return "at each seed, the weighted sum of cells (the least-squares contrast of the design)"
    shared = "; settings that share trained weights are averaged first"
    settings = f", averaged over the settings of the other factors{shared}"
    settings = settings if effect.settings > 1 else ""
    if len(effect.change) > 1:
        return f"at each seed, both levels minus each alone, plus neither{settings}"
    factor, level = effect.change[0]
    base = study.factors[factor][0]
    return f"at each seed, the trial with {factor}={level} minus its partner with {base}{settings}"


def _first(by_seed: Mapping[int, TrialRow]) -> TrialRow:
    return next(row for row in by_seed.values() if "kv" in row.record)
