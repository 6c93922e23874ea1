"""What each level costs against its factor's baseline level, and whether costs add up."""

from kvlab.analysis.divergence import MOST_DEVIATIONS
from kvlab.analysis.effects import Effect, change_name, judge_together
from kvlab.analysis.interactions import SPLIT_SHARE
from kvlab.analysis.statistics import spread_factors
from kvlab.analysis.study import GAP_ROUNDING, Study
from kvlab.analysis.trial_rows import is_time
from kvlab.analysis.verdicts import VERDICTS
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.report.overview import effects_figure
from kvlab.store.metrics import BEGINNINGS, METRICS

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

MAX_INTERACTIONS = 60
"""Rows of the table of interactions; the strongest come first."""

MAX_OPEN_ROWS = 12
"""Rows of a table of interactions that is not folded."""

MAX_LISTED_SEEDS = 4
"""Differences are listed seed by seed up to this number of seeds."""


def report_effects(study: Study) -> doc.Section | None:
    """Report every level's effect on the primary metric, and on other measurements."""
    metric = study.primary_metric
    effects = study.effects(metric)
    estimated = [effect for effect in effects if effect.estimate]
    if not estimated:
        return None
    rows = (
        (_effect_entries(study, effects, one), _key(study, one), not one.estimate)
        for one in effects
    )
    serving = [e for e in estimated if study.estimand.changes_serving_alone(e.change)]
    apart = dict.fromkeys(e.claim for e in estimated if e.at and e not in serving)
    contents: list[doc.Content] = [
        texts.write("effects", study=study, effects=estimated, serving=serving, apart=apart),
        doc.make_table("effects", f"Effects on the {METRICS[metric].title}.", rows),
        *_report_wrong_trainings(study, estimated),
        *([figure] if (figure := effects_figure(study)) else []),
        doc.Fold("How effects are estimated, and what verdicts say", _explain(study, estimated)),
    ]
    if others := judge_other_metrics(study):
        folded: list[doc.Content] = []
        if study.timing_obstacle and any(map(is_time, study.measured_metrics)):
            text = f"{study.timing_obstacle}, so no difference of times is judged."
            folded.append(doc.paragraph(text))
        with_items = any(effect.metric.startswith("hellaswag_") for effect in others)
        caption = texts.fill("caption of other effects", with_items=with_items)
        other_rows = ((_other_entries(study, one), _key(study, one)) for one in others)
        folded.append(doc.make_table("effects-other", caption, other_rows))
        contents.append(doc.Fold("Effects on other measurements", tuple(folded)))
    return doc.Section("What each level does", tuple(contents))


def _report_wrong_trainings(study: Study, estimated: list[Effect]) -> list[doc.Content]:
    """List the trainings that went wrong, and the levels' verdicts without them."""
    wrong, metric = study.wrong_trainings, study.primary_metric
    if not wrong:
        return []
    first_rows = {row.training: row for row in reversed(study.done_rows) if row.training in wrong}
    named = [
        f"{study.label(row.levels)} at seed {row.seed} ({wrong[training]:.0f} deviations)"
        for training, row in reversed(first_rows.items())
    ]
    fields = {"named": named, "most": MOST_DEVIATIONS, "is_share": METRICS[metric].is_share}
    contents: list[doc.Content] = [texts.write("wrong trainings", n_wrong=len(wrong), **fields)]
    without = {effect.name: effect for effect in study.without_wrong.effects(metric)}
    interval = cols.simultaneous_column(metric, study.decide.alpha, "without them")
    rows = []
    for effect in estimated:
        other = without.get(effect.name)
        if effect.went_wrong and other is not None:
            entries = (
                ("level", effect.name),
                ("went wrong", effect.went_wrong, "trainings of the comparison"),
                ("difference", cols.difference_cell(metric, effect.value)),
                ("verdict", effect.verdict),
                ("without them", cols.difference_cell(metric, other.value)),
                (interval, cols.simultaneous_cell(metric, other)),
                ("verdict without them", other.verdict),
            )
            rows.append((entries, _key(study, effect)))
    if rows:
        caption = "Levels with and without the trainings that went wrong."
        table = doc.make_table("went-wrong", caption, rows)
        contents.append(doc.Fold("Without them", (table,)))
    return contents


def _key(study: Study, effect: Effect) -> str:
    return study.change_key((*effect.change, *effect.at))


def _effect_entries(study: Study, effects: list[Effect], effect: Effect) -> doc.Entries:
    metric, unit = study.primary_metric, fmt.difference_unit(study.primary_metric)
    estimate, (factor, level) = effect.estimate, effect.change[0]
    is_apart = any(one.at for one in effects)
    yield "factor", factor
    yield "level", level
    if is_apart:
        beside = ", ".join(f"{name}={other}" for name, other in effect.at)
        yield "beside", doc.cell(beside, tone="muted")
    yield cols.csv_only("against"), doc.cell(study.factors[factor][0], tone="muted")
    yield cols.with_unit("difference", unit), _difference_cell(effect, effect.value)
    interval = cols.simultaneous_column(metric, study.decide.alpha)
    yield interval, cols.simultaneous_cell(metric, effect)
    yield "verdict", cols.verdict_cell(effect), "of the level, over all its settings"
    hint = (
        "of no difference, for all levels of this table; a cost below the margin needs no small p"
    )
    yield "p (corrected)", _p_cell(effect), hint
    if any(one.divergence is not None for one in effects):
        hint = "pairs in which only the level, and only its partner, diverged"
        column = doc.Column("diverged", True, hint, ("diverged", "partner diverged"))
        diverged, found = doc.Cell("0", 0, csv=(0, 0)), effect.divergence
        if found is not None:
            text = f"{found.level} of {found.pairs}, partner {found.partner}"
            tone: doc.Tone = "bad" if found.level else ""
            diverged = doc.Cell(text, found.level, tone, csv=(found.level, found.partner))
        yield column, diverged
    hint = "the larger one: pooled over all levels that change training, or the level's own"
    error = own_interval = own_p = groups = doc.EMPTY_CELL
    if estimate is not None and effect.is_tested:
        error = doc.cell("pooled" if effect.tested_error.is_pooled else "own")
        own_interval = cols.range_cell(metric, estimate.low, estimate.high)
        own_p = doc.cell(fmt.format_p_value(estimate.p), estimate.p)
    yield cols.csv_only(doc.Column("error", False, hint)), error
    hint = "of the level's own paired t-test, for it alone"
    yield cols.csv_only(cols.range_column("95% CI", unit, hint)), own_interval
    hint = "of the level's own paired t-test, uncorrected"
    yield cols.csv_only(doc.Column("p", True, hint)), own_p
    hint = "baseline level's KV bytes divided by the level's"
    savings = cols.range_column("KV smaller", hint=hint, ends=("least", "most"))
    yield savings, _savings_cell(study, effect)
    hint = "matched pairs used, of those in the design"
    used, designed = effect.pairs_used, effect.pairs_designed
    text, csv = f"{used} of {designed}", (used, designed)
    pairs = doc.Cell(text, used, csv=csv)
    if effect.is_contrast:  # it has seeds instead of pairs
        pairs = doc.Cell(f"{text} seeds", used, csv=(None, None))
    yield doc.Column("pairs", True, hint, ("pairs used", "pairs designed")), pairs
    column, groups = cols.groups_entry(effect)
    yield column, groups if estimate is not None else doc.EMPTY_CELL
    hint = "smallest and largest mean difference of a setting"
    values, settings = [value for _, value in effect.by_setting], doc.EMPTY_CELL
    if len(values) > 1:
        settings = cols.range_cell(metric, min(values), max(values))
    yield cols.range_column("over settings", unit, hint), settings
    if is_apart:
        over_all = effect.value if effect.over_all is None else effect.over_all.value
        column = doc.Column(f"mean over all settings ({unit})", True)
        yield cols.csv_only(column), _difference_cell(effect, over_all)
    csv_heads = tuple(f"difference at seed {seed} ({unit})" for seed in study.seeds)
    column = doc.Column("by seed", True, "mean difference at each seed", csv_heads)
    yield cols.csv_only(column), _seeds_cell(study, effect)
    yield from _last_entries(effects, effect, "difference")


def _last_entries(effects: list[Effect], effect: Effect, what: str) -> doc.Entries:
    metric, hint = effect.metric, f"true {what} called with 80% power"
    heads = (f"detectable ({fmt.difference_unit(metric)})",)
    smallest = cols.magnitude_cell(metric, effect.detectable)
    yield cols.csv_only(doc.Column("detectable", True, hint, heads)), smallest
    if any(one.aliases for one in effects):
        aliases, names = doc.EMPTY_CELL, "; ".join(map(change_name, effect.aliases))
        if names:
            aliases = doc.Cell(cols.name_aliases(effect, "; "), names)
        yield "aliased with", aliases, "a part of these is in the difference"


def _difference_cell(effect: Effect, value: float) -> doc.Cell:
    return cols.difference_cell(effect.metric, value) if effect.estimate else doc.EMPTY_CELL


def _p_cell(effect: Effect) -> doc.Cell:
    p = effect.corrected_p if effect.has_interval and effect.is_tested else None
    return cols.number_cell(p, fmt.format_p_value)


def _seeds_cell(study: Study, effect: Effect) -> doc.Cell:
    """Return the difference at each seed, or with many seeds how many are above zero."""
    if effect.estimate is None:
        return doc.EMPTY_CELL
    metric, by_seed = effect.metric, dict(effect.by_seed)
    values = by_seed.values()
    csv = tuple(
        fmt.in_display_unit(metric, by_seed[s]) if s in by_seed else None for s in study.seeds
    )
    if len(by_seed) <= MAX_LISTED_SEEDS:
        text = ", ".join(fmt.format_difference(metric, value) for value in values)
        return doc.Cell(text, max(values, default=None), csv=csv)
    positive = sum(value > 0 for value in values)
    return doc.Cell(f"{positive} of {len(by_seed)} above 0", positive, csv=csv)


def _savings_cell(study: Study, effect: Effect) -> doc.Cell:
    """Return by how much the level shrinks the cache, over the settings that were compared."""
    factor, level = effect.change[0]
    index = list(study.factors).index(factor)
    ratios = []
    for others, _ in effect.by_setting:
        small, large = (
            study.kv_bytes((*others[:index], one, *others[index:]))
            for one in (level, study.factors[factor][0])
        )
        if small and large:
            ratios.append(large / small)
    if not ratios:
        return doc.EMPTY_CELL
    low, high = min(ratios), max(ratios)
    text = fmt.format_ratio(low)
    if high / low >= 1.005:
        text = f"{fmt.format_significant(low)} to {fmt.format_ratio(high)}"
    return doc.Cell(text, low, csv=(low, high))


def _explain(study: Study, estimated: list[Effect]) -> tuple[doc.Content, ...]:
    """Explain how the effects are estimated, and what each verdict of the table means."""
    is_contrast = any(effect.is_contrast for effect in estimated)
    contents: list[doc.Content] = [texts.write("pairs", is_contrast=is_contrast)]
    tested = [effect for effect in estimated if effect.is_tested]
    if tested:
        errors = [one.error for one in tested if one.error]
        df = min((e.tested_error.df for e in tested if e.tested_error.df >= 2), default=0.0)
        freedom = [fmt.format_significant(n, 2) for n in (df, *spread_factors(df))] if df else []
        fields = {"errors": errors, "freedom": freedom}
        contents.append(texts.write("simultaneous intervals", study=study, **fields))
    words = {e.verdict_name: e.verdict for e in study.effects(study.primary_metric)}
    meanings = [(doc.Strong(words[name]), f": {VERDICTS[name].meaning}") for name in sorted(words)]
    return (*contents, doc.Bullets(tuple(meanings)))


def judge_other_metrics(study: Study) -> list[Effect]:
    """Return the effects on all other measurements that compare, judged together."""
    derived = [  # a paired loss is a one-shot loss once more, of the served text alone
        m for m, metric in METRICS.items() if metric.derive and not m.endswith("_paired")
    ]
    # of one tokenizer the loss in another unit, and of several a loss of different tokens
    left_out = "bits_per_byte" if len(study.tokenizers) <= 1 else "loss"
    others = [m for m in study.measured_metrics if m.startswith(BEGINNINGS["compared"])]
    metrics = [
        m
        for m in (*OTHER_METRICS, *(m for m in others if METRICS[m].better != "neither"), *derived)
        if m not in (study.primary_metric, left_out)
        and not study.is_disturbed(m)
        and any(row.measurements.get(m) for row in study.done_rows)  # zero everywhere: no row
        and not _repeats(study, m)
    ]
    found = [effect for metric in metrics for effect in study.effects(metric) if effect.estimate]
    return judge_together(found, study.decide.alpha)


def _repeats(study: Study, metric: str) -> bool:
    """Return whether a measurement is the one that decides once more: a loss that has no gap."""
    both = [
        (row.measurements.get(metric), row.measurements.get(study.primary_metric))
        for row in study.done_rows
    ]
    return all(
        one is not None and other is not None and abs(one - other) < GAP_ROUNDING
        for one, other in both
    )


def _other_entries(study: Study, effect: Effect) -> doc.Entries:
    metric, value = effect.metric, effect.value
    unit, number = fmt.difference_unit(metric), fmt.in_display_unit(metric, value)
    yield "measurement", fmt.short_title(metric)
    yield "factor", effect.change[0][0]
    yield "level", effect.name.partition("=")[2]
    difference = doc.Column("difference", True, csv=("difference", "unit"))
    text = fmt.difference_with_unit(metric, value)
    yield difference, doc.Cell(text, number, csv=(number, unit))
    title = f"simultaneous {fmt.format_confidence(study.decide.alpha)}"
    interval = cols.range_column(title, hint="in the unit of the difference")
    yield interval, cols.simultaneous_cell(metric, effect)
    yield "verdict", cols.verdict_cell(effect), "of the level in this measurement"
    yield "p (corrected)", _p_cell(effect), "of no difference, for all rows of this table"
    hint = "matched pairs, or seeds where there are none"
    yield "pairs", doc.cell(fmt.format_fixed(effect.pairs_used, 0), effect.pairs_used), hint


# Interactions


def report_interactions(study: Study) -> doc.Section | None:
    """List the interactions of the levels that ran together, in the primary metric."""
    effects = [effect for effect in study.interactions(study.primary_metric) if effect.estimate]
    if not effects:
        return None
    # By corrected p-value; untested ones by size.
    strongest = sorted(effects, key=lambda e: (e.corrected_p, -abs(e.value)))
    shown = strongest[:MAX_INTERACTIONS]
    caption = texts.fill("caption of interactions", n=len(strongest), shown=len(shown))
    rows = ((_sum_entries(study, shown, one), _key(study, one)) for one in shown)
    table = doc.make_table("interactions", caption, rows)
    found = any(effect.is_significant for effect in effects)
    is_open = len(shown) <= MAX_OPEN_ROWS and (found or len(effects) == 1)
    is_contrast = any(effect.is_contrast for effect in effects)
    method = texts.write(
        "interactions",
        study=study,
        share=SPLIT_SHARE,
        is_contrast=is_contrast,
        has_other_base=any(effect.against for effect in effects),
    )
    first = next((effect for effect in strongest if effect.is_significant), strongest[0])
    fields = {"effects": strongest, "name": _name(first), "verdict": _sum_verdict(first)}
    contents = (
        texts.write("sums", first=first, **fields),
        table if is_open else doc.Fold("All interactions", (table,)),
        doc.Fold("How interactions are estimated", (method,)),
    )
    return doc.Section("Do the costs add up?", contents)


def _sum_entries(study: Study, effects: list[Effect], effect: Effect) -> doc.Entries:
    metric = effect.metric
    yield "levels together", _name(effect)
    title = cols.with_unit("beyond the sum", fmt.difference_unit(metric))
    yield title, cols.difference_cell(metric, effect.value)
    alpha, hint = SPLIT_SHARE * study.decide.alpha, "for all rows together"
    interval = cols.simultaneous_column(metric, alpha, hint)
    yield interval, cols.simultaneous_cell(metric, effect)
    tone = VERDICTS[effect.verdict_name].tone
    yield "verdict", doc.cell(_sum_verdict(effect), tone=tone), "of the interaction"
    yield "p (corrected)", _p_cell(effect), "for all interactions"
    yield cols.groups_entry(effect)
    yield from _last_entries(effects, effect, "interaction")


def _name(effect: Effect) -> str:
    """Return the levels of an interaction, and of all others that are the same contrast."""
    names = [" + ".join(f"{factor}={level}" for factor, level in effect.change)]
    names[0] += "".join(f" (against {factor}={level})" for factor, level in effect.against)
    for sign, change in effect.same_as:
        other = " + ".join(f"{factor}={level}" for factor, level in change)
        names.append(other if sign > 0 else f"{fmt.MINUS}({other})")
    return " or ".join(names)


def _sum_verdict(effect: Effect) -> str:
    words = {
        "higher": "above the sum",
        "lower": "below the sum",
        "identical": "additive exactly",
        "equivalent": f"additive within {METRICS[effect.metric].write_margin(effect.margin)}",
        "within noise": "additive within noise",
    }
    return words.get(effect.verdict_name, effect.verdict)
