"""Main effects: what each level costs against its factor's baseline level."""

from kvlab.analysis.effects import Effect, judge_together
from kvlab.analysis.standard_errors import StandardError
from kvlab.analysis.statistics import spread_factors
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import is_time
from kvlab.analysis.verdicts import VERDICTS
from kvlab.analysis.went_wrong import MOST_DEVIATIONS
from kvlab.humanize import format_count
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
    format_p_value,
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
        paragraph(_state_estimand(study, estimated)),
        *_report_wrong_trainings(study, estimated),
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


def _state_estimand(study: Study, estimated: list[Effect]) -> str:
    """Say what the numbers of the table are means over."""
    text = (
        "The difference of a level that changes weights is the mean over the settings that are"
        " served as they were trained."
    )
    if study.decide.over:
        over = ", ".join(f"{name}={'|'.join(levels)}" for name, levels in study.decide.over.items())
        text = (
            f"The difference of a level that changes weights is the mean over {over}, as declared."
        )
    if any(study.estimand.changes_serving_alone(effect.change) for effect in estimated):
        text += (
            " A level that changes serving is compared in each setting with the same weights served"
            " as they were trained."
        )
    apart = [e for e in estimated if e.at and not study.estimand.changes_serving_alone(e.change)]
    if apart:
        names = ", ".join(dict.fromkeys(effect.claim for effect in apart))
        text += (
            f" The settings disagree on {names}, so each kind of setting has a row of its own; the"
            " CSV has the mean over all."
        )
    return text


def _report_wrong_trainings(study: Study, estimated: list[Effect]) -> list[Content]:
    """List the trainings that went wrong, and the levels' verdicts without them."""
    wrong = study.wrong_trainings
    if not wrong:
        return []
    named = [
        f"{study.label(row.levels)} at seed {row.seed} ({wrong[row.training]:.0f} deviations)"
        for row in {row.training: row for row in reversed(study.done_rows)}.values()
        if row.training in wrong
    ]
    text = (
        f" {format_count(len(wrong), 'training')}: {'; '.join(reversed(named))}. A training went"
        f" wrong if its one-shot loss is more than {MOST_DEVIATIONS:g} robust standard deviations"
        " above the median of its cell. Such trainings stay in every number. A level whose"
        " comparison has one is not said to cost less than the margin: the next ones may go wrong,"
        " too."
    )
    without = {effect.name: effect for effect in study.without_wrong.effects(study.primary_metric)}
    rows = tuple(
        Row(
            (
                cell(effect.name),
                cell(str(effect.went_wrong), effect.went_wrong),
                difference_cell(effect.metric, effect.value),
                cell(effect.verdict),
                difference_cell(effect.metric, other.value),
                simultaneous_cell(other),
                cell(other.verdict),
            ),
            _key(study, effect),
        )
        for effect in estimated
        if effect.went_wrong and (other := without.get(effect.name)) is not None
    )
    columns = (
        Column("level"),
        Column("went wrong", True, "trainings of the comparison"),
        Column("difference", True),
        Column("verdict"),
        Column("without them", True),
        simultaneous_column(study.primary_metric, study.decide.alpha, "without them"),
        Column("verdict without them"),
    )
    contents: list[Content] = [paragraph(Strong("Trainings that went wrong."), text)]
    if rows:
        caption = "Levels with and without the trainings that went wrong."
        contents.append(Fold("Without them", (Table("went-wrong", caption, columns, rows),)))
    return contents


def _key(study: Study, effect: Effect) -> str:
    return study.change_key((*effect.change, *effect.at))


def _table(study: Study) -> Table:
    metric = study.primary_metric
    unit, effects = difference_unit(metric), study.effects(metric)
    apart = (Column("beside"),) if any(effect.at for effect in effects) else ()
    columns = (
        Column("factor"),
        Column("level"),
        *apart,
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
        *((csv_only(Column(f"mean over all settings ({unit})", True)),) if apart else ()),
        csv_only(seeds_column(study.seeds, unit)),
        csv_only(detectable_column(unit, "true difference called with 80% power")),
    )
    rows = tuple(_row(study, effect, _any_diverged(effects), bool(apart)) for effect in effects)
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
        text += _describe_pairing(study, [one.error for one in estimated if one.error])
    if study.declared_looks is not None:
        text += (
            " The claims are judged at the looks (see there). Each has the seeds, the interval and"
            " the p-value of its last look, and these hold for all looks together."
        )
    return [paragraph(text)]


def _describe_pairing(study: Study, errors: list[StandardError]) -> str:
    """Say how much pairing by seeds has gained, and whether the errors use it."""
    seeds = study.seed_effect
    if seeds is None:
        return ""
    text = (
        " Trials of a pair have equal batches and initial weights. Differences within a seed spread"
        f" {format_fixed(seeds.spread_ratio, 2)} times as much as trainings without their pairs"
        f" (F test of the seeds, p: {format_p_value(seeds.p)})"
    )
    if all(error.is_paired for error in errors):
        return text + ", and the errors are those of differences within a seed."
    if not any(error.is_paired for error in errors):
        return text + ": pairing gains too little, and the errors are those of the trainings."
    return text + "; each error is that of the kind that its trainings ask for."


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


def _row(study: Study, effect: Effect, any_diverged: bool, any_apart: bool) -> Row:
    factor, level = effect.change[0]
    beside = cell(", ".join(f"{name}={other}" for name, other in effect.at), tone="muted")
    names = (
        cell(factor),
        cell(level),
        *((beside,) if any_apart else ()),
        cell(study.factors[factor][0], tone="muted"),
    )
    pairs, key = pairs_cell(effect), _key(study, effect)
    over_all = effect.over_all.value if effect.over_all is not None else effect.value
    mean_cells = (difference_cell(effect.metric, over_all),) if any_apart else ()
    diverged = (diverged_cell(effect),) if any_diverged else ()
    if effect.estimate is None:
        verdict = (EMPTY_CELL, EMPTY_CELL, verdict_cell(effect), EMPTY_CELL, *diverged)
        cells = (*names, *verdict, *(EMPTY_CELL,) * 4, pairs, *(EMPTY_CELL,) * 2)
        cells = (*cells, *((EMPTY_CELL,) if any_apart else ()), *(EMPTY_CELL,) * 2)
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
            *mean_cells,
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
    factor = effect.change[0][0]
    metric, value = effect.metric, effect.value
    unit, number = difference_unit(metric), in_display_unit(metric, value)
    text = f"{format_difference(metric, value)} {unit}".strip()
    cells = (
        cell(short_title(metric)),
        cell(factor),
        cell(effect.name.partition("=")[2]),
        Cell(text, number, csv=(number, unit)),
        simultaneous_cell(effect),
        verdict_cell(effect),
        p_cell(effect, effect.corrected_p) if effect.has_interval else EMPTY_CELL,
        cell(format_fixed(effect.pairs_used, 0), effect.pairs_used),
    )
    return Row(cells, _key(study, effect))
