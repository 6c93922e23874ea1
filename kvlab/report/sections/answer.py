"""The answer: the sweep's question, and sentences that answer it from the numbers."""

from kvlab.analysis.effects import Effect
from kvlab.analysis.serving_gaps import ServingGap, fewest_trainings
from kvlab.analysis.statistics import t_quantile
from kvlab.analysis.study import GAP_ROUNDING, Study
from kvlab.analysis.verdicts import VERDICTS, judge_interval
from kvlab.humanize import format_count
from kvlab.report.benchmark_lines import describe_timing_obstacle
from kvlab.report.document import Bullets, Content, Paragraph, Section, Span, Strong, paragraph
from kvlab.report.formatting import (
    difference_unit,
    display_unit,
    format_difference,
    format_exact_bytes,
    format_magnitude,
    format_metric,
    format_p_value,
    format_ratio,
)
from kvlab.report.pareto_front import best_cells_by_budget, describe_choice, memory_front
from kvlab.store.metrics import METRICS

MAX_NAMED_LEVELS = 4
"""Levels that each list names individually."""

MAX_SEEDS = 100
"""Seeds above which the answer does not say how many would decide a level."""


def report_answer(study: Study) -> Section:
    """Answer the sweep's question."""
    contents: list[Content] = [paragraph(Strong(str(study.sweep["question"])))]
    if study.is_untrained:
        contents += _answer_untrained(study)
    elif study.done_rows:
        findings = [*_describe_cost(study), _describe_savings(study), _describe_confidence(study)]
        floor = _describe_bigram_table(study)
        # models that measure noise are said before what they would show
        contents += [*floor, *findings] if _count_below_table(study) else [*findings, *floor]
    if (missing := _describe_missing(study)) is not None:
        contents.append(missing)
    return Section("The answer", tuple(contents))


def _describe_cost(study: Study) -> list[Content]:
    """Describe what each level costs by itself: what is decided, bounded, and neither."""
    metric = study.primary_metric
    title, unit = METRICS[metric].title, display_unit(metric)
    base = study.values(study.baseline, metric)
    text = f"The baseline is not measured in {title}"
    if base:
        mean = format_metric(metric, sum(base.values()) / len(base))
        text = f"In {title} the baseline is at {mean} {unit} ({format_count(len(base), 'seed')})"
    elif study.diverged_cells.get(study.baseline) == len(study.cells[study.baseline]):
        text = "The baseline diverged at every seed"
    effects = sorted(
        (e for e in study.effects(metric) if e.estimate or e.verdict_name == "diverged"),
        key=lambda effect: -abs(effect.value),
    )
    if not effects:
        return [paragraph(f"{text}; no level has a matched pair of finished trials yet.")]
    if any(effect.has_interval for effect in effects):
        confidence = f"{100 * (1 - study.decide.alpha):g}%"
        text += ". The levels against their baseline levels, on average over the settings of the"
        text += f" other factors, with simultaneous {confidence} intervals:"
    else:
        text += ". The levels against their baseline levels:"
    groups: dict[str, list[Effect]] = {}
    for effect in effects:
        groups.setdefault(_GROUPS.get(effect.verdict_name, "Not claimed"), []).append(effect)
    order = [*dict.fromkeys(_GROUPS.values()), "Not claimed"]
    bullets = [
        (Strong(name), ": ", *_effect_spans(groups[name], metric), ".")
        for name in order
        if name in groups
    ]
    return [paragraph(text), Bullets(tuple(bullets))]


_GROUPS = {
    **dict.fromkeys(("worse", "worse within", "better", "higher", "lower"), "Decided"),
    **dict.fromkeys(("bounded", "equivalent", "identical"), "Bounded"),
    **dict.fromkeys(("within noise", "undecided"), "Not decided"),
    **dict.fromkeys(("diverged", "baseline diverged"), "Diverged"),
    **dict.fromkeys(("one seed", "unvaried", "awaited"), "Not tested"),
}
"""Name of a verdict -> what the answer lists it under."""


def _effect_spans(effects: list[Effect], metric: str) -> list[Span]:
    """Name the largest effects with their differences, and count the others."""
    spans: list[Span] = []
    most = MAX_NAMED_LEVELS if len(effects) > MAX_NAMED_LEVELS + 1 else len(effects)
    for number, effect in enumerate(effects[:most]):
        spans += ["; " if number else "", Strong(effect.name)]
        text = f" {format_difference(metric, effect.value)}" if effect.estimate else ""
        is_open = _is_open(effect)
        if effect.has_interval:
            low, high = (format_difference(metric, end) for end in (effect.low, effect.high))
            seeds = f"; {_describe_seeds(effect)}" if is_open else ""
            text += f" ({low} to {high}{seeds})"
        if not is_open and effect.verdict_name != "one seed":
            text += f", {effect.verdict}"
        spans.append(text)
    if len(effects) > most:
        spans.append(f"; and {len(effects) - most} smaller ones")
    if effects[0].verdict_name == "one seed":
        spans.append(": one seed, so no difference is claimed")
    if _is_open(effects[0]):
        spans.append(". So many seeds, declared beforehand, would decide it by what was seen")
    return spans


def _is_open(effect: Effect) -> bool:
    return effect.verdict_name in ("within noise", "undecided")


def _describe_seeds(effect: Effect) -> str:
    seeds = _seeds_to_decide(effect)
    return f"more than {MAX_SEEDS} seeds" if seeds is None else f"about {seeds} seeds"


def _seeds_to_decide(effect: Effect) -> int | None:
    """Return the number of seeds whose interval would exclude zero, or end below the margin."""
    error, size = effect.tested_error, abs(effect.value)
    is_higher_better = METRICS[effect.metric].better == "higher"
    cost = -effect.value if is_higher_better else effect.value
    for count in range(len(effect.seeds) + 1, MAX_SEEDS + 1):
        df = error.df * (count - 1) / max(1, len(effect.seeds) - 1)
        reach = t_quantile(1 - effect.alpha / (2 * effect.n_tests), df)
        reach *= error.value * (len(effect.seeds) / count) ** 0.5
        if reach < size or (effect.margin is not None and cost + reach < effect.margin):
            return count
    return None


def _describe_savings(study: Study) -> Paragraph:
    """Describe what the reductions save together."""
    metric = study.primary_metric
    front = [point for point in memory_front(study) if point.is_on_front]
    base = study.kv_bytes(study.baseline)
    if not front or base is None:
        return paragraph("No cell has both its KV bytes and its quality recorded yet.")
    smallest = front[0]
    if smallest.levels == study.baseline:
        text = f"No measured cell stores less than the baseline's {format_exact_bytes(base)}"
        return paragraph(f"{text} and is on the front of memory against quality.")
    spans: list[Span] = [
        "The smallest cache that no other cell beats is that of ",
        Strong(study.label(smallest.levels)),
        f", {format_exact_bytes(round(smallest.cost))} for one sequence at block size,"
        f" {_size_clause(base, smallest.cost)}",
        _baseline_clause(study, smallest.levels),
    ]
    bests = [best for best in best_cells_by_budget(study) if best.point.levels != smallest.levels]
    if bests:
        point = bests[0].point
        spans += [f"; {bests[0].condition} the best cell is ", Strong(study.label(point.levels))]
        clause = _baseline_clause(study, point.levels)
        choice = describe_choice(study, bests[0])
        spans.append(f" at {format_metric(metric, point.mean)}{clause}{choice}")
    return Paragraph((*spans, "."))


def _size_clause(base: int, stored: float) -> str:
    return (
        "the baseline's size"
        if stored == base
        else f"{format_ratio(base / stored)} smaller than the baseline's"
    )


def _baseline_clause(study: Study, levels: tuple[str, ...]) -> str:
    if levels == study.baseline:
        return ""
    metric = study.primary_metric
    estimate = study.cell_differences.get(levels)
    if estimate is None:
        return ""
    text = f", {format_difference(metric, estimate.value)} against the baseline"
    if estimate.kind == "one seed":
        return f"{text} (at one seed)"
    effect = study.cell_effects.get(levels)
    if effect is not None and not effect.has_interval:
        return f"{text} ({effect.verdict})"
    if estimate.kind != "tested":
        return text
    margin = study.decide.margin
    verdict = judge_interval(estimate.low, estimate.high, METRICS[metric].better, margin)
    words = VERDICTS[verdict].words.format(margin=f"{margin or 0.0:g}")
    ends = " to ".join(format_difference(metric, end) for end in (estimate.low, estimate.high))
    return f"{text} (simultaneous {100 * (1 - study.decide.alpha):g}% {ends}, {words})"


def _describe_confidence(study: Study) -> Paragraph:
    """Describe the smallest difference that the design can detect."""
    metric, unit = study.primary_metric, difference_unit(study.primary_metric)
    spans: list[Span] = []
    spans += _gap_spans(study)
    effects = study.effects(metric)
    detectable = sorted(e.detectable for e in effects if e.detectable is not None)
    claimed = [effect for effect in effects if effect.is_claimed]
    is_decided = all(VERDICTS[effect.verdict_name].concludes for effect in claimed)
    if claimed and is_decided and len(study.seeds) > 1:
        what = "level" if len(claimed) == len(effects) else "claimed level"
        spans.append(f"every {what} is decided or bounded")
    elif detectable:
        low, high = (
            format_magnitude(metric, detectable[0]),
            format_magnitude(metric, detectable[-1]),
        )
        limit = f"{low} {unit}" if low == high else f"{low} to {high} {unit} (by level)"
        spans.append(f"by the spread seen, this design of {format_count(len(study.seeds), 'seed')}")
        spans.append(f" calls with 80% power a true difference of about {limit}")
    elif len(study.seeds) == 1:
        spans.append("with one seed the spread between seeds is unknown, so no difference is")
        spans.append(" significant or within noise: add seeds before drawing a conclusion")
    elif any(effect.is_tested for effect in effects):
        spans.append("two seeds tell apart only what is many times larger than the spread between")
        spans.append(" them: add seeds before drawing a conclusion")
    else:
        is_over = not study.status_counts["missing"]
        spans.append("no difference could be tested")
        spans.append("" if is_over else ": finish the sweep's other seeds")
    first, *rest = spans
    if isinstance(first, str):
        first = first[:1].upper() + first[1:]
    return Paragraph((first, *rest, "."))


def _gap_spans(study: Study) -> list[Span]:
    """Describe the largest serving gap; nothing if none was measured."""
    if not study.serving_gaps:
        return []
    worst = max(study.serving_gaps, key=lambda levels: study.serving_gaps[levels].value)
    gap = study.serving_gaps[worst]
    if gap.value < GAP_ROUNDING:
        return ["Scoring through the serving cache agrees with one-shot scoring; "]
    text = f"{format_difference('serving_gap', gap.value)} {METRICS['serving_gap'].unit}"
    if gap.trainings > 1:
        ends = (format_difference("serving_gap", end) for end in (gap.smallest, gap.largest))
        count = format_count(gap.trainings, "training")
        text += f" ({' to '.join(ends)} over {count}{_gap_clause(gap)})"
    hides = "One-shot scoring hides what serving does: the largest serving gap is "
    return [hides, text, " at ", Strong(study.label(worst)), "; "]


def _gap_clause(gap: ServingGap) -> str:
    """Describe the exact test of a gap that was picked from all cells."""
    if not gap.can_be_found:
        return f"; an exact test needs {fewest_trainings(gap.alpha)}"
    return f", exact p {format_p_value(gap.p)}{'' if gap.is_found else ', within noise'}"


def _losses_and_tables(study: Study) -> list[tuple[float, float]]:
    """Return every model's one-shot loss and that of its bigram table, in nats per token."""
    return [
        (row.measurements["loss"], row.measurements["loss_bigram"])
        for row in study.done_rows
        if "loss" in row.measurements and "loss_bigram" in row.measurements
    ]


def _count_below_table(study: Study) -> int:
    """Return how many models do not beat their bigram table."""
    return sum(loss >= table for loss, table in _losses_and_tables(study))


def _describe_bigram_table(study: Study) -> list[Paragraph]:
    """Say whether the models beat a bigram table of the text that they were trained on."""
    pairs = _losses_and_tables(study)
    if not pairs:
        return []
    margins = [table - loss for loss, table in pairs]
    table = f"{format_metric('loss', sum(table for _, table in pairs) / len(pairs))} nats/token"
    losing = _count_below_table(study)
    if not losing:
        closest = format_magnitude("loss", min(margins))
        return [
            paragraph(
                f"Every model beats a bigram table of the text that it was trained on ({table} on"
                f" the same held-out text), the closest by {closest}."
            )
        ]
    count = f"{losing:,} of {format_count(len(pairs), 'trained model')}"
    best = format_metric("loss", min(loss for loss, _ in pairs))
    return [
        paragraph(
            Strong(f"{count} cannot yet do what a bigram table does."),
            f" A table of token pairs, counted in the text that the model was trained on, scores"
            f" {table} on the same held-out text; the best model scores {best}. Differences"
            " between models that have not learned to use their context are mostly noise: train"
            " on more tokens, with smaller batches, or at another learning rate.",
        )
    ]


def _describe_missing(study: Study) -> Paragraph | None:
    others = {state: count for state, count in study.status_counts.items() if state != "done"}
    if not set(others) - {"pruned"}:  # a search that prunes leaves no more than that
        return None
    listed = ", ".join(f"{count:,} {state}" for state, count in sorted(others.items()))
    total = f"{len(study.done_rows):,} of {format_count(len(study.rows), 'trial')}"
    text = f" {total} are measured ({listed}); every number here is of those alone."
    return paragraph(Strong("This report is partial."), text)


def _answer_untrained(study: Study) -> list[Paragraph]:
    """Compare what layouts store and how fast they decode, where no weights are trained."""
    about = paragraph(
        "The weights are as drawn, so losses say nothing and are left out: this is a study of"
        " memory and speed, which do not depend on the weights' values."
    )
    return [part for part in (_untrained_bytes(study), _untrained_times(study), about) if part]


def _untrained_bytes(study: Study) -> Paragraph | None:
    base = study.kv_bytes(study.baseline)
    if base is None:
        return None
    stored = {levels: study.kv_bytes(levels) for levels in study.cells}
    smaller = [
        (Strong(study.label(levels)), f" {format_ratio(base / count)}")
        for levels, count in sorted(stored.items(), key=lambda item: -(item[1] or 0))
        if count is not None and count < base
    ]
    spans: list[Span] = [
        f"The baseline's cache holds {format_exact_bytes(base)} for one sequence at"
    ]
    if not smaller:
        return paragraph(*spans, " block size; no other cell's is smaller.")
    spans.append(" block size; smaller are ")
    for number, part in enumerate(smaller):
        last = number and number == len(smaller) - 1
        spans += [" and " if last else ", " if number else "", *part]
    return paragraph(*spans, ".")


def _untrained_times(study: Study) -> Paragraph | None:
    metric = "tpot_ms_p50"
    means = study.means(metric)
    base = means.get(study.baseline)
    if base is None:
        return None
    spans: list[Span] = [
        f"A token takes the baseline {format_metric(metric, base)} ms (median, batch 1,"
        f" {format_count(len(study.seeds), 'run')} a cell)"
    ]
    fastest = min(means, key=lambda levels: (means[levels], study.cell_index(levels)))
    if fastest != study.baseline:
        spans += ["; least it takes ", Strong(study.label(fastest))]
        spans.append(f", {format_metric(metric, means[fastest])} ms")
        obstacle = describe_timing_obstacle(study)
        if obstacle:
            spans.append(f". {obstacle}, so this order is no finding")
    return paragraph(*spans, ".")
