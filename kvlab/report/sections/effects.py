"""Main effects: what each level costs against its factor's baseline level."""

from kvlab.report.alias_column import with_aliases
from kvlab.report.effects import ALPHA, Effect, corrected
from kvlab.report.figures.plot import Axis, Plot, Point, Points
from kvlab.report.numbers import (
    TIMES,
    counted,
    difference,
    difference_unit,
    fixed,
    p_value,
    short,
    shown,
    significant,
    times,
)
from kvlab.report.section import (
    EMPTY,
    Cell,
    Column,
    Content,
    Figure,
    Heading,
    Row,
    Section,
    Table,
    Tone,
    cell,
    paragraph,
)
from kvlab.report.statistics.paired import spread_factors
from kvlab.report.study import Study
from kvlab.trial.metrics import METRICS

OTHERS = (
    "loss",
    "bits_per_byte",
    "hellaswag_acc_norm",
    "hellaswag_acc_norm_served",
    "tpot_ms_p50",
    "training_tokens_per_second",
)
MOST_SEEDS = 4
"""Differences are listed seed by seed up to this many seeds."""


def effects(study: Study) -> Section | None:
    metric = study.primary
    found = [effect for effect in study.effects(metric) if effect.estimate]
    if not found:
        return None
    title, unit = METRICS[metric].title, difference_unit(metric)
    columns = (
        Column("factor"),
        Column("level"),
        Column("against"),
        Column(f"difference ({unit})", True),
        Column("95% CI", True),
        Column("p", True, "two-sided t-test, uncorrected"),
        Column("p (Holm)", True, "corrected for all levels of this table"),
        Column("verdict"),
        Column("KV smaller", True, "baseline level's KV bytes divided by the level's"),
        Column("pairs", True, "matched pairs used, of those in the design"),
        Column(f"groups {TIMES} seeds", True, "independent conditions, and seeds"),
        Column("over settings", True, "smallest and largest mean difference of a setting"),
        Column("by seed", True, "mean difference at each seed"),
        Column("detectable", True, "true difference called with 80% power"),
    )
    everything = study.effects(metric)
    rows = tuple(_row(study, effect) for effect in everything)
    heads, rows = with_aliases(columns, rows, everything)
    table = Table("effects", f"Effects on the {title}.", heads, rows)
    contents: list[Content] = [*_method(study, found), table, _figure(study, found)]
    others = _others(study)
    if others:
        contents += [Heading("Effects on other measurements"), others]
    return Section("What each level does", tuple(contents))


def _method(study: Study, found: list[Effect]) -> list[Content]:
    text = (
        "A pair is two trials at the same seed and the same levels of all other factors, one with"
        " the level and one with the baseline level. Settings whose trials share trained weights"
        " are averaged into one group and count once. At every seed the difference is the mean"
        " over groups; it is tested over the seeds (a paired t-test, seeds minus one degrees of"
        " freedom), since what shares a seed may move together. Settings that were not seen at"
        " the same seeds as the others are left out: see pairs. The difference describes these"
        " settings; that a level acts differently in them (see over settings) is no noise."
    )
    tests = max((effect.tests for effect in found if effect.tested), default=0)
    rule = (
        f" Verdicts hold at {ALPHA:g} after Holm's correction for {counted(tests, 'level')};"
        " within noise means not told apart from zero, not shown to be zero."
    )
    if any(effect.by_contrast for effect in found):
        text += _BY_CONTRAST
    single = " There is one seed: differences are shown, no significance is claimed."
    repeated = any(effect.tested for effect in found)
    end = rule if repeated else single if len(study.seeds) == 1 else ""
    return [paragraph(text + end), *_power(found)]


def _power(found: list[Effect]) -> list[Content]:
    """How roughly so few seeds tell what could have been detected."""
    freedoms = {effect.estimate.df for effect in found if effect.estimate and effect.tested}
    if not freedoms:
        return []
    fewest = min(freedoms) + 1
    if fewest < 3:
        return [paragraph(_TWO_SEEDS)]
    low, high = (significant(factor, 2) for factor in spread_factors(fewest - 1))
    text = (
        "The detectable difference is what this design calls with 80% power at the strictest step"
        f" of the correction, by the spread that was seen. {fewest} seeds tell a spread only"
        f" roughly: the true one is between {low} and {high} times it (95%), and so is what can"
        " be detected."
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


def _row(study: Study, effect: Effect) -> Row:
    factor, level = effect.change[0]
    names = (cell(factor), cell(level), cell(study.factors[factor][0], tone="muted"))
    unit = " seeds" if effect.by_contrast else ""
    pairs = cell(f"{effect.comparisons} of {effect.designed}{unit}", effect.comparisons)
    if effect.estimate is None:
        tail = (cell(effect.verdict, tone="muted"), EMPTY, pairs, *(EMPTY,) * 4)
        return Row((*names, *(EMPTY,) * 4, *tail), tone="muted")
    groups = f"{effect.groups} {TIMES} {len(effect.seeds)}"
    size = cell(groups, effect.groups * len(effect.seeds))
    metric, value = effect.metric, effect.estimate.value
    detectable = effect.detectable
    return Row(
        (
            *names,
            cell(difference(metric, value), value),
            *_test(effect),
            cell(effect.verdict, tone=_tone(effect)),
            _smaller(study, effect),
            pairs,
            size,
            _range(effect),
            _by_seed(effect),
            EMPTY if detectable is None else cell(shown(metric, detectable), detectable),
        )
    )


def _test(effect: Effect) -> tuple[Cell, Cell, Cell]:
    if effect.estimate is None or not effect.tested:
        return EMPTY, EMPTY, EMPTY
    low = difference(effect.metric, effect.estimate.low)
    high = difference(effect.metric, effect.estimate.high)
    width = effect.estimate.high - effect.estimate.low
    return (
        cell(f"{low} to {high}", width),
        cell(p_value(effect.estimate.p), effect.estimate.p),
        cell(p_value(effect.corrected), effect.corrected),
    )


def _tone(effect: Effect) -> Tone:
    tones: dict[str, Tone] = {"worse": "bad", "better": "good", "within noise": "muted"}
    return tones.get(effect.verdict, "")


def _range(effect: Effect) -> Cell:
    values = [value for _, value in effect.by_setting]
    if len(values) < 2:
        return EMPTY
    low, high = min(values), max(values)
    low_text, high_text = difference(effect.metric, low), difference(effect.metric, high)
    return cell(f"{low_text} to {high_text}", high - low)


def _by_seed(effect: Effect) -> Cell:
    values = [value for _, value in effect.by_seed]
    if len(values) <= MOST_SEEDS:
        listed = ", ".join(difference(effect.metric, value) for value in values)
        return cell(listed, max(values))
    up = sum(value > 0 for value in values)
    return cell(f"{up} of {len(values)} above 0", up)


def _smaller(study: Study, effect: Effect) -> Cell:
    """By how much the level shrinks the cache, over the settings that were compared."""
    factor, level = effect.change[0]
    place = list(study.factors).index(factor)
    ratios = []
    for others, _ in effect.by_setting:
        mine = (*others[:place], level, *others[place:])
        base = (*others[:place], study.factors[factor][0], *others[place:])
        small, large = study.kv_bytes(mine), study.kv_bytes(base)
        if small and large:
            ratios.append(large / small)
    if not ratios:
        return EMPTY
    low, high = min(ratios), max(ratios)
    both = times(low) if high / low < 1.005 else f"{significant(low)} to {times(high)}"
    return cell(both, high)


def _figure(study: Study, found: list[Effect]) -> Figure:
    metric = study.primary
    unit = difference_unit(metric)
    names = tuple(effect.name for effect in found)
    called: list[Point] = []
    quiet: list[Point] = []
    for place, effect in enumerate(found):
        assert effect.estimate is not None, "only effects with an estimate are drawn"
        low, high = effect.estimate.low, effect.estimate.high
        tip = [effect.name, f"{difference(metric, effect.estimate.value)} {unit}"]
        if effect.tested:
            tip.append(f"95% CI {difference(metric, low)} to {difference(metric, high)}")
            tip.append(f"p (Holm) {p_value(effect.corrected)}")
        bars = (low, high) if effect.tested else None
        point = Point(effect.estimate.value, place, (*tip, effect.verdict), x_range=bars)
        (called if effect.called else quiet).append(point)
    claimed = "within noise" if any(e.tested for e in found) else "not tested"
    plot = Plot(
        Axis(f"difference in {short(metric)} ({unit})"),
        Axis("", "names", names),
        (Points("differs", tuple(called), "c1", "diamond"), Points(claimed, tuple(quiet), "muted")),
        zero=True,
    )
    alt = "; ".join(
        f"{effect.name}: {difference(metric, effect.estimate.value)} {unit}, {effect.verdict}"
        for effect in found
        if effect.estimate
    )
    caption = "Difference of each level from its factor's baseline level, with 95% intervals."
    return Figure("effects", caption, f"Differences against the baseline levels. {alt}.", plot)


def _others(study: Study) -> Table | None:
    derived = [name for name, metric in METRICS.items() if metric.derive]
    metrics = [m for m in (*OTHERS, *derived) if m in study.measured and m != study.primary]
    everything = corrected([effect for metric in metrics for effect in study.effects(metric)])
    rows = []
    for effect in everything:
        if effect.estimate is None:
            continue
        factor, level = effect.change[0]
        metric, value = effect.metric, effect.estimate.value
        interval, _, p_corrected = _test(effect)
        pairs = cell(fixed(effect.comparisons, 0), effect.comparisons)
        names = (cell(short(metric)), cell(factor), cell(level))
        change = cell(f"{difference(metric, value)} {difference_unit(metric)}".strip(), value)
        verdict = cell(effect.verdict, tone=_tone(effect))
        rows.append(Row((*names, change, interval, p_corrected, verdict, pairs)))
    columns = (
        Column("measurement"),
        Column("factor"),
        Column("level"),
        Column("difference", True),
        Column("95% CI", True),
        Column("p (Holm)", True, "corrected for all rows of this table"),
        Column("verdict"),
        Column("pairs", True),
    )
    caption = (
        "The same comparison for other measurements. HellaSwag's error here is over seeds; its"
        " error over items stands in its own section."
    )
    return Table("effects-other", caption, columns, tuple(rows)) if rows else None
