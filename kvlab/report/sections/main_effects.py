"""Main effects: what each level costs against its factor's baseline level."""

from kvlab.analysis.effects import Effect, judge_together
from kvlab.analysis.statistics import spread_factors
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import is_time
from kvlab.analysis.verdicts import VERDICTS
from kvlab.report.document import (
    EMPTY_CELL,
    Bullets,
    Cell,
    Column,
    Content,
    Fold,
    Row,
    Section,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.formatting import (
    difference_unit,
    format_difference,
    format_fixed,
    format_ratio,
    format_significant,
    in_display_unit,
    short_title,
)
from kvlab.report.overview import effects_figure
from kvlab.report.table_columns import (
    append_aliases,
    csv_only,
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
    estimated = [effect for effect in study.effects(study.primary_metric) if effect.estimate]
    if not estimated:
        return None
    contents: list[Content] = [
        paragraph(_introduce(study, estimated)),
        _table(study),
        *([figure] if (figure := effects_figure(study)) else []),
        Fold("How effects are estimated, and what verdicts say", tuple(_explain(study, estimated))),
    ]
    other_table = _other_metrics_table(study)
    if other_table:
        note = _timing_note(study)
        contents.append(Fold("Effects on other measurements", (*note, other_table)))
    return Section("What each level does", tuple(contents))


def _introduce(study: Study, estimated: list[Effect]) -> str:
    title = METRICS[study.primary_metric].title
    text = (
        f"Each level against its factor's baseline level, in {title}: the mean difference between"
        " trials that differ in this level alone, at the same seed."
    )
    if any(effect.has_interval for effect in estimated):
        confidence = f"{100 * (1 - study.decide.alpha):g}%"
        text += (
            f" The intervals hold for all levels together with {confidence} probability, and each"
            " verdict is read from its interval."
        )
    elif len(study.seeds) == 1:
        text += " There is one seed, so no difference is tested."
    return text


def _table(study: Study) -> Table:
    metric = study.primary_metric
    unit, effects = difference_unit(metric), study.effects(metric)
    columns = (
        Column("factor"),
        Column("level"),
        csv_only(Column("against")),
        Column(f"difference ({unit})" if unit else "difference", True),
        simultaneous_column(metric, study.decide.alpha),
        Column("verdict"),
        Column("p (corrected)", True, "for all levels of this table"),
        *([diverged_column()] if _any_diverged(effects) else []),
        csv_only(Column("error", False, _ERROR)),
        csv_only(interval_column(metric, "of the level's own paired t-test, for it alone")),
        csv_only(Column("p", True, "of the level's own paired t-test, uncorrected")),
        range_column("KV smaller", hint=_SMALLER, ends=("least", "most")),
        pairs_column(),
        csv_only(groups_column()),
        range_column("over settings", unit, _SETTINGS),
        csv_only(seeds_column(study.seeds, unit)),
        csv_only(detectable_column(unit, "true difference called with 80% power")),
    )
    rows = tuple(_row(study, effect, _any_diverged(effects)) for effect in effects)
    all_columns, rows = append_aliases(columns, rows, effects)
    return Table("effects", f"Effects on the {METRICS[metric].title}.", all_columns, rows)


_SMALLER = "baseline level's KV bytes divided by the level's"
_ERROR = "the larger one: pooled over all levels that change training, or the level's own"
_SETTINGS = "smallest and largest mean difference of a setting"


def _timing_note(study: Study) -> list[Content]:
    """Say why the table has no times, if they do not compare."""
    if not study.timing_obstacle or not any(map(is_time, study.measured_metrics)):
        return []
    return [paragraph(f"{study.timing_obstacle}, so no difference of times is judged.")]


def _any_diverged(effects: list[Effect]) -> bool:
    return any(effect.divergence is not None for effect in effects)


def _explain(study: Study, estimated: list[Effect]) -> list[Content]:
    """Explain how the effects are estimated, and what each verdict of the table means."""
    return [
        paragraph(_describe_pairs(estimated)),
        *_describe_intervals(study, estimated),
        *_describe_power(estimated),
        *_describe_verdicts(study.effects(study.primary_metric)),
    ]


def _describe_pairs(estimated: list[Effect]) -> str:
    text = (
        "A pair is two trials at the same seed and the same levels of all other factors: one has"
        " the level, the other the baseline level. A setting is one combination of the other"
        " factors' levels. Settings that share trained weights are averaged first and count once."
        " The mean over settings is taken at every seed, and these means are tested over the seeds."
        " Settings in which a training diverged, or that lack seeds, are left out: see the column"
        " pairs. The column over settings shows how much the difference varies between settings."
    )
    if any(effect.is_contrast for effect in estimated):
        text += (
            " A level without a pair in this design is estimated by a contrast over all cells: the"
            " least-squares main effect at every seed. It contains a part of every interaction that"
            " it is aliased with."
        )
    return text


def _describe_intervals(study: Study, estimated: list[Effect]) -> list[Content]:
    if not any(effect.is_tested for effect in estimated):
        return []
    text = (
        "The simultaneous intervals are t intervals with Holm's correction. If a later step of the"
        " correction finds a difference, its interval ends at zero."
    )
    if any(effect.error for effect in estimated):
        text += (
            " The standard error of a level that changes training is the larger of its own, over"
            " its seeds, and one that is pooled over all such levels. The CSV has the level's own"
            " t-test, which holds for this level alone, and the differences by seed."
        )
    if study.declared_looks is not None:
        text += (
            " The claims are judged at the looks (see there). Each has the seeds, the interval and"
            " the p-value of its last look, and these hold for all looks together."
        )
    return [paragraph(text)]


def _describe_verdicts(effects: list[Effect]) -> list[Content]:
    """Say what each verdict of the table means."""
    words = {effect.verdict_name: effect.verdict for effect in effects}
    meanings = [(Strong(words[name]), f": {VERDICTS[name].meaning}") for name in sorted(words)]
    return [Bullets(tuple(meanings))]


def _describe_power(estimated: list[Effect]) -> list[Content]:
    """Describe the detectable difference, and how well this number of seeds tells it."""
    freedoms = [effect.tested_error.df for effect in estimated if effect.is_tested]
    if not freedoms:
        return []
    if max(freedoms) < 2:
        return [paragraph(_TWO_SEEDS)]
    fewest = min(df for df in freedoms if df >= 2)
    low, high = (format_significant(factor, 2) for factor in spread_factors(fewest))
    text = (
        "The detectable difference, in the CSV, is the true difference that this design finds with"
        f" 80% power after the correction. It assumes the observed spread. With"
        f" {format_significant(fewest, 2)} degrees of freedom the true spread is between {low} and"
        f" {high} times the observed one."
    )
    return [paragraph(text)]


_TWO_SEEDS = (
    "Two seeds hardly tell the spread between seeds, so only very large differences are found. The"
    " interval of three seeds is on average a third as wide, that of five seeds a sixth."
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


def _other_metrics_table(study: Study) -> Table | None:
    effects = judge_other_metrics(study)
    rows = tuple(_other_row(study, effect) for effect in effects)
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
        caption += " HellaSwag's error is over seeds here, and over items in its own section."
    return Table("effects-other", caption, columns, rows) if rows else None


def judge_other_metrics(study: Study) -> list[Effect]:
    """Return the effects on all other measurements that compare, judged together."""
    derived = [  # a paired loss is a one-shot loss once more, of the served text alone
        m for m, metric in METRICS.items() if metric.derive and not m.endswith("_paired")
    ]
    tasks = [m for m in study.measured_metrics if m.startswith(LM_EVAL_PREFIX)]
    metrics = [
        m
        for m in (*OTHER_METRICS, *(m for m in tasks if METRICS[m].better != "neither"), *derived)
        if m != study.primary_metric
        and not study.is_disturbed(m)
        and any(row.measurements.get(m) for row in study.done_rows)  # zero everywhere: no row
    ]
    found = [effect for metric in metrics for effect in study.effects(metric) if effect.estimate]
    return judge_together(found, study.decide.alpha)


def _other_row(study: Study, effect: Effect) -> Row:
    factor, level = effect.change[0]
    metric, value = effect.metric, effect.value
    unit, number = difference_unit(metric), in_display_unit(metric, value)
    text = f"{format_difference(metric, value)} {unit}".strip()
    cells = (
        cell(short_title(metric)),
        cell(factor),
        cell(level),
        Cell(text, number, csv=(number, unit)),
        simultaneous_cell(effect),
        verdict_cell(effect),
        p_cell(effect, effect.corrected_p) if effect.has_interval else EMPTY_CELL,
        cell(format_fixed(effect.pairs_used, 0), effect.pairs_used),
    )
    return Row(cells, study.change_key(effect.change))
