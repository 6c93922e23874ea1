"""The answer: the sweep's question, and sentences that answer it from the numbers."""

import math

from kvlab.analysis.effects import Effect
from kvlab.analysis.statistics import t_quantile
from kvlab.analysis.study import GAP_ROUNDING, Study
from kvlab.analysis.trial_rows import is_time
from kvlab.analysis.verdicts import VERDICTS
from kvlab.humanize import format_count
from kvlab.report.document import Bullets, Content, Paragraph, Section, Span, Strong, paragraph
from kvlab.report.formatting import (
    difference_unit,
    display_unit,
    format_binary_size,
    format_difference,
    format_magnitude,
    format_metric,
    format_ratio,
    format_significant,
)
from kvlab.report.hellaswag_outcomes import COMPARED_METRICS, all_at_chance
from kvlab.report.overview import report_overview
from kvlab.report.record_warnings import list_confounds, list_warnings
from kvlab.store.metrics import METRICS

MAX_NAMED_LEVELS = 4
"""Levels that each list names individually."""

MAX_NUMBERS = 3
"""Differences that each list prints; the figure has all of them."""

MAX_SEEDS = 100
"""Seeds above which the answer does not say how many would decide a level."""


def report_answer(study: Study) -> Section:
    """Answer the sweep's question."""
    contents: list[Content] = [paragraph(Strong(str(study.sweep["question"])))]
    if study.status_counts["damaged"]:
        contents.append(_describe_damage(study))
    overview = report_overview(study)
    if study.is_untrained:
        contents += [*overview, *_answer_untrained(study)]
    elif study.done_rows:
        findings = [
            *_describe_cost(study),
            *_describe_gap(study),
            paragraph(_describe_confidence(study), _describe_left_out(study)),
        ]
        floor = _describe_bigram_table(study)
        # models that measure noise are said before what they would show
        is_noise = bool(_count_below_table(study))
        contents += [*floor, *overview, *findings] if is_noise else [*overview, *findings, *floor]
    else:
        contents += overview
    if (missing := _describe_missing(study)) is not None:
        contents.append(missing)
    if not study.is_untrained and any(e.aliases for e in study.effects(study.primary_metric)):
        contents.append(paragraph(_ALIASED))
    contents += [Paragraph(note) for note in list_confounds(study)]
    contents += list_warnings(study)
    return Section("The answer", tuple(contents))


_ALIASED = (
    "This design runs a part of all cells, so a level's difference contains a part of the"
    " interactions that it is aliased with. The table of effects names them."
)


def _describe_cost(study: Study) -> list[Content]:
    """Say what each level costs: the levels of every verdict, with the largest differences."""
    effects = sorted(
        (
            e
            for e in study.effects(study.primary_metric)
            if e.estimate or e.verdict_name == "diverged"
        ),
        key=lambda effect: -abs(effect.value),
    )
    start = _describe_baseline(study)
    if not effects:
        return [paragraph(f"{start} No level has a matched pair of finished trials yet.")]
    groups: dict[str, list[Effect]] = {}
    for effect in effects:
        groups.setdefault(effect.verdict_name, []).append(effect)
    order = [name for name in VERDICTS if name in groups]
    bullets = tuple(tuple(_group_spans(study, groups[name])) for name in order)
    text = f"{start} The levels, each against its factor's baseline level:"
    return [paragraph(text), Bullets(bullets)]


def _describe_baseline(study: Study) -> str:
    metric = study.primary_metric
    title, base = METRICS[metric].title, study.mean(study.baseline, metric)
    if base is not None:
        also = _describe_text_metric(study, base)
        value = f"{format_metric(metric, base)} {display_unit(metric)}".strip()
        return f"The baseline's {title} is {value}{also}."
    if study.diverged_cells.get(study.baseline) == len(study.cells[study.baseline]):
        return "The baseline diverged at every seed."
    return f"The baseline is not measured in {title}."


def _describe_text_metric(study: Study, loss: float) -> str:
    """Return a loss per token as bits per byte or perplexity, in brackets."""
    if METRICS[study.primary_metric].unit != "nats/token":
        return ""
    if study.tokenizers == {"bytes"}:
        return f" ({format_significant(loss / math.log(2), 4)} bits/byte)"
    return f" (perplexity {format_significant(math.exp(min(loss, 700.0)), 4)})"


def _group_spans(study: Study, effects: list[Effect]) -> list[Span]:
    """Name the levels of one verdict, the largest differences first, and count the others."""
    first = effects[0]
    words = first.verdict
    spans: list[Span] = [Strong(f"{words[:1].upper()}{words[1:]}"), ": "]
    most = MAX_NAMED_LEVELS if len(effects) > MAX_NAMED_LEVELS + 1 else len(effects)
    for number, effect in enumerate(effects[:most]):
        spans += ["; " if number else "", effect.name]
        if effect.estimate and number < MAX_NUMBERS:
            unit = f" {difference_unit(effect.metric)}" if not number else ""
            spans.append(f" {format_difference(effect.metric, effect.value)}{unit}")
    spans.append(f"; and {len(effects) - most} smaller ones." if len(effects) > most else ".")
    if _is_open(first):
        spans.append(_describe_seeds(effects, study))
    return spans


def _is_open(effect: Effect) -> bool:
    return effect.verdict_name in ("within noise", "undecided")


def _describe_seeds(effects: list[Effect], study: Study) -> str:
    """Say how many seeds would decide the open level that needs the fewest."""
    if study.declared_looks is not None:
        return ""
    counts = [count for one in effects if (count := _seeds_to_decide(one)) is not None]
    if not counts:
        return f" By the spread seen, more than {MAX_SEEDS} seeds would decide them."
    it = "it" if len(effects) == 1 else "the clearest of them"
    return f" By the spread seen, about {min(counts)} seeds, set beforehand, would decide {it}."


def _seeds_to_decide(effect: Effect) -> int | None:
    """Return the number of seeds whose interval would exclude zero, or end below the margin."""
    if not effect.is_tested:
        return None
    error, size = effect.tested_error, abs(effect.value)
    is_higher_better = METRICS[effect.metric].better == "higher"
    cost = -effect.value if is_higher_better else effect.value
    for count in range(len(effect.seeds) + 1, MAX_SEEDS + 1):
        df = error.df * (count - 1) / max(1, len(effect.seeds) - 1)
        reach = t_quantile(1 - effect.level / 2, df)
        reach *= error.value * math.sqrt(len(effect.seeds) / count)
        if reach < size or (effect.margin is not None and cost + reach < effect.margin):
            return count
    return None


def _describe_confidence(study: Study) -> str:
    """Say what this number of seeds can find."""
    metric, unit = study.primary_metric, difference_unit(study.primary_metric)
    effects = study.effects(metric)
    detectable = sorted(e.detectable for e in effects if e.detectable is not None)
    claimed = [effect for effect in effects if effect.is_claimed]
    seeds = format_count(len(study.seeds), "seed")
    if claimed and all(VERDICTS[e.verdict_name].concludes for e in claimed):
        what = "level" if len(claimed) == len(effects) else "claimed level"
        text = f"Every {what} is decided or bounded"
    elif detectable:
        low, high = (format_magnitude(metric, size) for size in (detectable[0], detectable[-1]))
        limit = f"{low} {unit}" if low == high else f"{low} to {high} {unit}, by level"
        text = f"By the spread seen, {seeds} find a true difference of {limit}, with 80% power"
    elif len(study.seeds) == 1:
        text = "One seed shows no spread between seeds, so no difference is judged: add seeds"
    elif any(effect.is_tested for effect in effects):
        text = "Two seeds find only what is many times larger than the spread between them"
    else:
        text = "No difference could be tested"
        text += ": finish the sweep's other seeds" if study.status_counts["missing"] else ""
    return f"{text}."


def _describe_gap(study: Study) -> list[Content]:
    """Describe the largest serving gap; nothing if none was measured."""
    if not study.serving_gaps:
        return []
    worst = max(study.serving_gaps, key=lambda levels: study.serving_gaps[levels].value)
    gap = study.serving_gaps[worst]
    if gap.value < GAP_ROUNDING:
        return [paragraph("The loss through the serving cache is the one-shot loss in every cell.")]
    size = f"{format_difference('serving_gap', gap.value)} {METRICS['serving_gap'].unit}"
    spans = ["One-shot scoring hides a cost: the largest serving gap is that of "]
    ends = ""
    if gap.interval is not None:
        low, high = (format_difference("serving_gap", end) for end in gap.interval)
        ends = f" ({low} to {high})"
    return [paragraph(*spans, Strong(study.label(worst)), f", {size}{ends}.")]


def _describe_left_out(study: Study) -> str:
    """Say which measurements are no finding here: times that were disturbed, accuracies at chance.

    Their tables are in the appendix.
    """
    text = ""
    if any(map(is_time, study.measured_metrics)) and study.timing_obstacle:
        text += f" Speed is not judged. {study.timing_obstacle}."
    accuracies = [m for m in study.measured_metrics if m in COMPARED_METRICS]
    if accuracies and all_at_chance(study, accuracies):
        text += " HellaSwag is not judged: every accuracy is at chance."
    return text


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
    table = (
        f"{format_metric('loss', math.fsum(table for _, table in pairs) / len(pairs))} nats/token"
    )
    losing = _count_below_table(study)
    if not losing:
        closest = format_magnitude("loss", min(margins))
        return [
            paragraph(
                f"Every model beats a bigram table of its training text ({table} on the same"
                f" held-out text), the closest by {closest}."
            )
        ]
    count = f"{losing:,} of {format_count(len(pairs), 'trained model')}"
    best = format_metric("loss", min(loss for loss, _ in pairs))
    return [
        paragraph(
            Strong(f"{count} cannot yet do what a bigram table does."),
            f" A table of token pairs of the training text scores {table} on the same held-out"
            f" text; the best model scores {best}. Differences between models that do not use their"
            " context are mostly noise: train on more tokens, with smaller batches, or at another"
            " learning rate.",
        )
    ]


def _describe_damage(study: Study) -> Paragraph:
    damaged, total = study.status_counts["damaged"], format_count(len(study.rows), "trial")
    verb = "is" if damaged == 1 else "are"
    text = f" {damaged:,} of {total} {verb} not what was written, and {verb} left out."
    hint = f" `kvlab verify {study.name}` names the files; submitting again measures them anew."
    return paragraph(Strong("This record does not verify."), text + hint)


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
        "The weights are not trained, so losses are left out. Memory and speed do not depend on the"
        " weights' values."
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
        f"The baseline's cache holds {format_binary_size(base)} for one sequence at"
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
        obstacle = study.timing_obstacle
        if obstacle:
            spans.append(f". {obstacle}, so this order is no finding")
    return paragraph(*spans, ".")
