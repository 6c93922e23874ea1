"""Main effects: what each level costs against its factor's baseline level."""

from kvlab.analysis.effects import Effect, judge_together
from kvlab.analysis.statistics import spread_factors
from kvlab.analysis.study import Study
from kvlab.analysis.verdicts import VERDICTS
from kvlab.report.benchmark_lines import TIME_METRICS, describe_timing_obstacle
from kvlab.report.document import (
    EMPTY_CELL,
    Bullets,
    Cell,
    Column,
    Content,
    Figure,
    Heading,
    Row,
    Section,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.figures.plot import Axis, Plot, Point, Points
from kvlab.report.formatting import (
    difference_unit,
    format_difference,
    format_fixed,
    format_p_value,
    format_ratio,
    format_significant,
    in_display_unit,
    short_title,
)
from kvlab.report.table_columns import (
    append_aliases,
    detectable_cell,
    detectable_column,
    difference_cell,
    diverged_cell,
    diverged_column,
    groups_cell,
    groups_column,
    interval_column,
    own_interval_cell,
    p_cell,
    pairs_cell,
    pairs_column,
    range_column,
    seeds_cell,
    seeds_column,
    settings_cell,
    simultaneous_cell,
    simultaneous_column,
    verdict_cell,
)
from kvlab.store.metrics import LM_EVAL_PREFIX, METRICS

OTHER_METRICS = (
    "loss",
    "bits_per_byte",
    "serving_kl",
    "serving_top_changed",
    "hellaswag_acc_norm",
    "hellaswag_acc_norm_served",
    "tpot_ms_p50",
    "training_tokens_per_second",
)


def report_effects(study: Study) -> Section | None:
    """Report every level's effect on the primary metric, and on other measurements."""
    metric = study.primary_metric
    estimated = [effect for effect in study.effects(metric) if effect.estimate]
    if not estimated:
        return None
    title, unit = METRICS[metric].title, difference_unit(metric)
    effects = study.effects(metric)
    columns = (
        Column("factor"),
        Column("level"),
        Column("against"),
        Column(f"difference ({unit})", True),
        simultaneous_column(metric, study.decide.alpha, "holds for all levels of the table"),
        Column("verdict"),
        Column("p (corrected)", True, "for all levels of this table"),
        *([diverged_column()] if _any_diverged(effects) else []),
        Column("error", False, _ERROR),
        interval_column(metric, "of the level's own paired t-test, for it alone"),
        Column("p", True, "of the level's own paired t-test, uncorrected"),
        range_column("KV smaller", hint=_SMALLER, ends=("least", "most")),
        pairs_column(),
        groups_column(),
        range_column("over settings", unit, _SETTINGS),
        seeds_column(study.seeds, unit),
        detectable_column(unit, "true difference called with 80% power"),
    )
    rows = tuple(_row(study, effect, _any_diverged(effects)) for effect in effects)
    all_columns, rows = append_aliases(columns, rows, effects)
    table = Table("effects", f"Effects on the {title}.", all_columns, rows)
    contents: list[Content] = [
        *_describe_method(study, estimated),
        table,
        *_describe_verdicts(effects),
        _figure(study, estimated),
    ]
    other_table = _other_metrics_table(study)
    if other_table:
        contents += [Heading("Effects on other measurements"), *_timing_note(study), other_table]
    return Section("What each level does", tuple(contents))


_SMALLER = "baseline level's KV bytes divided by the level's"
_ERROR = "the larger one: pooled over all levels that change training, or the level's own"
_SETTINGS = "smallest and largest mean difference of a setting"


def _timing_note(study: Study) -> list[Content]:
    """Explain why times have no verdict, if they have none."""
    obstacle = describe_timing_obstacle(study)
    if not obstacle or not TIME_METRICS & set(study.measured_metrics):
        return []
    return [paragraph(f"{obstacle}, so differences of times are shown without a verdict.")]


def _any_diverged(effects: list[Effect]) -> bool:
    return any(effect.divergence is not None for effect in effects)


def _describe_method(study: Study, estimated: list[Effect]) -> list[Content]:
    text = (
        "A pair is two trials at the same seed and the same levels of all other factors, one with"
        " the level and one with the baseline level. Settings whose trials share trained weights"
        " are averaged into one group and count once. At every seed the difference is the mean"
        " over groups; it is tested over the seeds, since what shares a seed may move together."
        " Settings that were not seen at the same seeds as the others, or in which a training"
        " diverged, are left out: see pairs. The difference describes these settings; that a level"
        " acts differently in them (see over settings) is no noise."
    )
    if any(effect.is_contrast for effect in estimated):
        text += _BY_CONTRAST
    if not any(effect.is_tested for effect in estimated):
        one_seed = " There is one seed: differences are shown, no significance is claimed."
        return [paragraph(text + (one_seed if len(study.seeds) == 1 else ""))]
    return [paragraph(text), *_describe_intervals(study, estimated), *_describe_power(estimated)]


def _describe_intervals(study: Study, estimated: list[Effect]) -> list[Content]:
    tests = max(effect.n_tests for effect in estimated if effect.is_tested)
    of_all = "this level" if tests == 1 else f"all {tests} levels together"
    text = (
        f"The simultaneous intervals contain the true differences of {of_all} with"
        f" {100 * (1 - study.decide.alpha):g}% probability, and a verdict says what holds in the"
        " whole interval: both are one procedure."
    )
    if any(effect.error for effect in estimated):
        text += _POOLED
    if study.declared_looks is not None:
        text += _BY_LOOKS
    return [paragraph(text)]


_POOLED = (
    " The standard error of a level that changes training is the larger of its own, over its"
    " seeds, and one that is pooled over all such levels. Pooling is a model: it takes the variance"
    " of every training as equal, and it never makes an error smaller than the level's own. The"
    " level's own paired t-test, which needs no such model, stands beside it (95% CI, p); alone and"
    " uncorrected."
)


_BY_LOOKS = (
    " The claims of this sweep are judged by looks (see there): each has the seeds, the difference,"
    " the intervals and the p-values of its last look, by its own paired t-test, and they hold for"
    " all looks together."
)


def _describe_verdicts(effects: list[Effect]) -> list[Content]:
    """Say what each verdict of the table means."""
    words = {effect.verdict_name: effect.verdict for effect in effects}
    meanings = [(Strong(words[name]), f": {VERDICTS[name].meaning}") for name in sorted(words)]
    return [Bullets(tuple(meanings))]


def _describe_power(estimated: list[Effect]) -> list[Content]:
    """Describe the precision of the detectable difference with this number of seeds."""
    freedoms = [effect.tested_error.df for effect in estimated if effect.is_tested]
    if not freedoms:
        return []
    if max(freedoms) < 2:
        return [paragraph(_TWO_SEEDS)]
    fewest = min(df for df in freedoms if df >= 2)
    low, high = (format_significant(factor, 2) for factor in spread_factors(fewest))
    text = (
        "The detectable difference is what this design calls with 80% power after the correction,"
        f" by the spread that was seen. With {format_significant(fewest, 2)} degrees of freedom a"
        f" spread is known only roughly: the true one is between {low} and {high} times it (95%),"
        " and so is what can be detected."
    )
    return [paragraph(text)]


_TWO_SEEDS = (
    "Two seeds hardly tell a spread: only a difference many times larger than that between the"
    " seeds is told apart from noise, and what could have been detected is not quoted. Every"
    " further seed helps much: on average the interval of three is a third as wide, that of five a"
    " sixth."
)
_BY_CONTRAST = (
    " Levels without a pair in this design are estimated by a contrast over all its cells: the"
    " least-squares main effect at every seed, tested over seeds. It contains what it is aliased"
    " with, so it is the level's own only if those interactions are nothing."
)


def _row(study: Study, effect: Effect, any_diverged: bool) -> Row:
    factor, level = effect.change[0]
    names = (cell(factor), cell(level), cell(study.factors[factor][0], tone="muted"))
    pairs, key = pairs_cell(effect), study.change_key(effect.change)
    diverged = (diverged_cell(effect),) if any_diverged else ()
    if effect.estimate is None:
        verdict = (EMPTY_CELL, EMPTY_CELL, verdict_cell(effect), EMPTY_CELL, *diverged)
        cells = (*names, *verdict, *(EMPTY_CELL,) * 4, pairs, *(EMPTY_CELL,) * 4)
        return Row(cells, key, tone="muted")
    return Row(
        (
            *names,
            difference_cell(effect.metric, effect.estimate.value),
            simultaneous_cell(effect),
            verdict_cell(effect),
            p_cell(effect, effect.corrected_p) if effect.has_interval else EMPTY_CELL,
            *diverged,
            _error_cell(effect),
            own_interval_cell(effect),
            p_cell(effect, effect.estimate.p),
            _savings_cell(study, effect),
            pairs,
            groups_cell(effect),
            settings_cell(effect),
            seeds_cell(effect, study.seeds),
            detectable_cell(effect),
        ),
        key,
    )


def _error_cell(effect: Effect) -> Cell:
    if not effect.is_tested:
        return EMPTY_CELL
    return cell("pooled" if effect.tested_error.is_pooled else "own")


def _savings_cell(study: Study, effect: Effect) -> Cell:
    """Return by how much the level shrinks the cache, over the settings that were compared."""
    factor, level = effect.change[0]
    index = list(study.factors).index(factor)
    ratios = []
    for others, _ in effect.by_setting:
        levels = (*others[:index], level, *others[index:])
        base = (*others[:index], study.factors[factor][0], *others[index:])
        small, large = study.kv_bytes(levels), study.kv_bytes(base)
        if small and large:
            ratios.append(large / small)
    if not ratios:
        return EMPTY_CELL
    low, high = min(ratios), max(ratios)
    text = (
        format_ratio(low)
        if high / low < 1.005
        else f"{format_significant(low)} to {format_ratio(high)}"
    )
    return Cell(text, low, csv=(low, high))


def _figure(study: Study, estimated: list[Effect]) -> Figure:
    metric = study.primary_metric
    unit = difference_unit(metric)
    names = tuple(effect.name for effect in estimated)
    significant: list[Point] = []
    bounded: list[Point] = []
    insignificant: list[Point] = []
    for index, effect in enumerate(estimated):
        assert effect.estimate is not None, "only effects with an estimate are drawn"
        low, high = effect.low, effect.high
        tip = [effect.name, f"{format_difference(metric, effect.estimate.value)} {unit}"]
        if effect.has_interval:
            ends = f"{format_difference(metric, low)} to {format_difference(metric, high)}"
            tip.append(f"simultaneous {100 * (1 - effect.alpha):g}% {ends}")
            tip.append(f"p (corrected) {format_p_value(effect.corrected_p)}")
        bars = (low, high) if effect.has_interval else None
        lines, key = (*tip, effect.verdict), study.change_key(effect.change)
        point = Point(effect.estimate.value, index, lines, key, x_range=bars)
        if effect.is_significant:
            significant.append(point)
        else:
            (bounded if effect.verdict_name == "bounded" else insignificant).append(point)
    insignificant_name = "not told apart" if any(e.is_tested for e in estimated) else "not tested"
    plot = Plot(
        Axis(f"difference in {short_title(metric)} ({unit})"),
        Axis("", "names", names),
        (
            Points("differs", tuple(significant), "c1", "diamond"),
            Points("costs less than the margin", tuple(bounded), "c0", "square"),
            Points(insignificant_name, tuple(insignificant), "muted"),
        ),
        zero=True,
    )
    alt = "; ".join(
        f"{effect.name}: {format_difference(metric, effect.value)} {unit}, {effect.verdict}"
        for effect in estimated
    )
    caption = (
        "Difference of each level from its factor's baseline level, with simultaneous"
        f" {100 * (1 - study.decide.alpha):g}% intervals."
    )
    return Figure("effects", caption, f"Differences against the baseline levels. {alt}.", plot)


def _other_metrics_table(study: Study) -> Table | None:
    derived = [  # a paired loss is a one-shot loss once more, of the served text alone
        m for m, metric in METRICS.items() if metric.derive and not m.endswith("_paired")
    ]
    tasks = [m for m in study.measured_metrics if m.startswith(LM_EVAL_PREFIX)]
    metrics = [
        m
        for m in (*OTHER_METRICS, *(m for m in tasks if METRICS[m].better != "neither"), *derived)
        if m != study.primary_metric
        and any(row.measurements.get(m) for row in study.done_rows)  # zero everywhere: no row
    ]
    found = [effect for metric in metrics for effect in study.effects(metric)]
    unjudged = TIME_METRICS if describe_timing_obstacle(study) else frozenset()
    judged = judge_together([e for e in found if e.metric not in unjudged], study.decide.alpha)
    remaining = iter(judged)
    effects = [effect if effect.metric in unjudged else next(remaining) for effect in found]
    rows = []
    for effect in effects:
        if effect.estimate is None:
            continue
        factor, level = effect.change[0]
        metric, value = effect.metric, effect.estimate.value
        pairs = cell(format_fixed(effect.pairs_used, 0), effect.pairs_used)
        names = (cell(short_title(metric)), cell(factor), cell(level))
        unit, number = difference_unit(metric), in_display_unit(metric, value)
        change = Cell(
            f"{format_difference(metric, value)} {unit}".strip(), number, csv=(number, unit)
        )
        corrected_p = p_cell(effect, effect.corrected_p) if effect.has_interval else EMPTY_CELL
        judgement = simultaneous_cell(effect), verdict_cell(effect), corrected_p
        if metric in unjudged:
            judgement = EMPTY_CELL, cell("not judged", tone="muted"), EMPTY_CELL
        entries = (change, *judgement, pairs)
        rows.append(Row((*names, *entries), study.change_key(effect.change)))
    confidence = 100 * (1 - study.decide.alpha)
    columns = (
        Column("measurement"),
        Column("factor"),
        Column("level"),
        Column("difference", True, csv=("difference", "unit")),
        range_column(f"simultaneous {confidence:g}%", hint="in the unit of the difference"),
        Column("verdict"),
        Column("p (corrected)", True, "for all rows of this table"),
        Column("pairs", True, "matched pairs, or seeds where there are none"),
    )
    caption = "The same comparison for other measurements."
    if any(effect.metric.startswith("hellaswag_") for effect in effects):
        caption += (
            " HellaSwag's error here is over seeds; its error over items stands in its own section."
        )
    return Table("effects-other", caption, columns, tuple(rows)) if rows else None
