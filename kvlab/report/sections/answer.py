"""The answer: the sweep's question, and sentences that answer it from the numbers."""

import math
from functools import partial

from kvlab.analysis.effects import Effect
from kvlab.analysis.statistics import t_quantile
from kvlab.analysis.study import GAP_ROUNDING, Study
from kvlab.analysis.trial_rows import is_time
from kvlab.analysis.verdicts import VERDICTS
from kvlab.humanize import format_count
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
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


def report_answer(study: Study) -> doc.Section:
    """Answer the sweep's question."""
    contents: list[doc.Content] = [doc.paragraph(doc.Strong(str(study.sweep["question"])))]
    counts, n_trials = study.status_counts, format_count(len(study.rows), "trial")
    if damaged := counts["damaged"]:
        verb = "is" if damaged == 1 else "are"
        text = f" {damaged:,} of {n_trials} {verb} not what was written, and {verb} left out."
        hint = f" `kvlab verify {study.name}` names the files; submitting again measures them anew."
        contents.append(doc.paragraph(doc.Strong("This record does not verify."), text + hint))
    overview = report_overview(study)
    if study.is_untrained:
        contents += [*overview, *_answer_untrained(study)]
    elif not study.done_rows:
        contents += overview
    else:
        bigram, is_noise = _compare_with_bigrams(study)
        confidence = doc.paragraph(_describe_confidence(study), _describe_unjudged(study))
        findings = [*overview, *_describe_cost(study), *_describe_gap(study), confidence]
        # models that measure noise are said before what they would show
        contents += [*bigram, *findings] if is_noise else [*findings, *bigram]
    others = {state: count for state, count in counts.items() if state != "done"}
    if set(others) - {"pruned"}:  # a search that prunes leaves no more than that
        listed = ", ".join(f"{count:,} {state}" for state, count in sorted(others.items()))
        text = f" {len(study.done_rows):,} of {n_trials} are measured ({listed}); every number here"
        partial = doc.Strong("This report is partial.")
        contents.append(doc.paragraph(partial, f"{text} is of those alone."))
    if not study.is_untrained and any(e.aliases for e in study.effects(study.primary_metric)):
        contents.append(doc.paragraph(texts.fill("aliased levels")))
    contents += [doc.Paragraph(note) for note in list_confounds(study)]
    return doc.Section("The answer", (*contents, *list_warnings(study)))


def _describe_cost(study: Study) -> list[doc.Content]:
    """State the baseline, and list the levels of every verdict, the largest differences first."""
    metric = study.primary_metric
    title, base = METRICS[metric].title, study.mean(study.baseline, metric)
    if base is not None:
        value = f"{fmt.format_metric(metric, base)} {fmt.display_unit(metric)}".strip()
        if (of_text := cols.text_metric(study, base)) is not None:
            unit, number = of_text[0], fmt.format_significant(of_text[1], 4)
            value += f" ({f'{number} {unit}' if unit == 'bits/byte' else f'{unit} {number}'})"
        start = f"The baseline's {title} is {value}."
    elif study.diverged_cells.get(study.baseline) == len(study.cells[study.baseline]):
        start = "The baseline diverged at every seed."
    else:
        start = f"The baseline is not measured in {title}."
    effects = [e for e in study.effects(metric) if e.estimate or e.verdict_name == "diverged"]
    if not effects:
        return [doc.paragraph(f"{start} No level has a matched pair of finished trials yet.")]
    groups: dict[str, list[Effect]] = {}
    for effect in sorted(effects, key=lambda effect: -abs(effect.value)):
        groups.setdefault(effect.verdict_name, []).append(effect)
    bullets = tuple(_name_levels(study, groups[name]) for name in VERDICTS if name in groups)
    text = f"{start} The levels, each against its factor's baseline level:"
    return [doc.paragraph(text), doc.Bullets(bullets)]


def _name_levels(study: Study, effects: list[Effect]) -> tuple[doc.Span, ...]:
    """Name the levels of one verdict, the largest differences first, and count the others."""
    words = effects[0].verdict
    spans: list[doc.Span] = [doc.Strong(f"{words[:1].upper()}{words[1:]}"), ": "]
    most = MAX_NAMED_LEVELS if len(effects) > MAX_NAMED_LEVELS + 1 else len(effects)
    for number, effect in enumerate(effects[:most]):
        spans += ["; " if number else "", effect.name]
        if effect.estimate and number < MAX_NUMBERS:
            unit = f" {fmt.difference_unit(effect.metric)}" if not number else ""
            spans.append(f" {fmt.format_difference(effect.metric, effect.value)}{unit}")
    spans.append(f"; and {len(effects) - most} smaller ones." if len(effects) > most else ".")
    is_open = effects[0].verdict_name in ("within noise", "undecided")
    if is_open and study.declared_looks is None:
        counts = [count for one in effects if (count := _seeds_to_decide(one)) is not None]
        who, verb = f"more than {MAX_SEEDS} seeds", "would decide them"
        if counts:
            who = f"about {min(counts)} seeds, set beforehand,"
            verb = f"would decide {'it' if len(effects) == 1 else 'the clearest of them'}"
        spans.append(f" By the spread seen, {who} {verb}.")
    return tuple(spans)


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
    metric, unit = study.primary_metric, fmt.difference_unit(study.primary_metric)
    effects = study.effects(metric)
    detectable = [e.detectable for e in effects if e.detectable is not None]
    claimed = [effect for effect in effects if effect.is_claimed]
    if claimed and all(VERDICTS[e.verdict_name].concludes for e in claimed):
        what = "level" if len(claimed) == len(effects) else "claimed level"
        return f"Every {what} is decided or bounded."
    if detectable:
        limit = fmt.format_ends(detectable, partial(fmt.format_magnitude, metric))
        by_level = f" {unit}, by level" if " to " in limit else f" {unit}"
        seeds = study.seeds_of_a_cell
        found = f"{seeds} find a true difference of {limit}{by_level}"
        return f"By the spread seen, {found}, with 80% power."
    if len(study.seeds) == 1:
        return "One seed shows no spread between seeds, so no difference is judged: add seeds."
    if any(effect.is_tested for effect in effects):
        return "Two seeds find only what is many times larger than the spread between them."
    hint = ": finish the sweep's other seeds" if study.status_counts["missing"] else ""
    return f"No difference could be tested{hint}."


def _describe_gap(study: Study) -> list[doc.Content]:
    """Describe the largest serving gap; nothing if none was measured."""
    if not study.serving_gaps:
        return []
    worst, gap = max(study.serving_gaps.items(), key=lambda item: item[1].value)
    if gap.value < GAP_ROUNDING:
        text = "The loss through the serving cache is the one-shot loss in every cell."
        return [doc.paragraph(text)]
    size = f"{fmt.format_difference('serving_gap', gap.value)} {METRICS['serving_gap'].unit}"
    if gap.interval is not None:
        low, high = (fmt.format_difference("serving_gap", end) for end in gap.interval)
        size += f" ({low} to {high})"
    text = "One-shot scoring hides a cost: the largest serving gap is that of "
    return [doc.paragraph(text, doc.Strong(study.label(worst)), f", {size}.")]


def _describe_unjudged(study: Study) -> str:
    """Say which measurements are no finding: disturbed times and accuracies at chance."""
    text = ""
    if any(map(is_time, study.measured_metrics)) and study.timing_obstacle:
        text += f" Speed is not judged. {study.timing_obstacle}."
    accuracies = [m for m in study.measured_metrics if m in COMPARED_METRICS]
    if accuracies and all_at_chance(study, accuracies):
        text += " HellaSwag is not judged: every accuracy is at chance."
    return text


def _compare_with_bigrams(study: Study) -> tuple[list[doc.Paragraph], bool]:
    """Compare the models with a bigram table of the text that they were trained on.

    Returns:
        What is said of it, and whether a model does not beat its table.
    """
    pairs = [
        (row.measurements["loss"], row.measurements["loss_bigram"])
        for row in study.done_rows
        if {"loss", "loss_bigram"} <= row.measurements.keys()
    ]
    if not pairs:
        return [], False
    mean = math.fsum(table for _, table in pairs) / len(pairs)
    table, best = (fmt.format_metric("loss", loss) for loss in (mean, min(pairs)[0]))
    n_losing = sum(loss >= table for loss, table in pairs)
    if not n_losing:
        closest = fmt.format_magnitude("loss", min(table - loss for loss, table in pairs))
        text = f"Every model beats a bigram table of its training text ({table} nats/token on the"
        return [doc.paragraph(f"{text} same held-out text), the closest by {closest}.")], False
    count = f"{n_losing:,} of {format_count(len(pairs), 'trained model')}"
    text = " " + texts.fill("bigram table", table=table, best=best)
    strong = doc.Strong(f"{count} cannot yet do what a bigram table does.")
    return [doc.paragraph(strong, text)], True


def _answer_untrained(study: Study) -> list[doc.Paragraph]:
    """Compare what layouts store and how fast they decode, where no weights are trained."""
    contents: list[doc.Paragraph] = []
    base = study.kv_bytes(study.baseline)
    if base is not None:
        sizes = {c: size for c in study.cells if (size := study.kv_bytes(c)) and size < base}
        held = f"The baseline's cache holds {fmt.format_binary_size(base)} for one sequence at"
        held += " block size; " + ("smaller are " if sizes else "no other is smaller")
        spans: list[doc.Span] = [held]
        order = sorted(sizes, key=lambda levels: -sizes[levels])
        for number, levels in enumerate(order):
            is_last = number and number == len(order) - 1
            spans.append(" and " if is_last else ", " if number else "")
            ratio = fmt.format_ratio(base / sizes[levels])
            spans += [doc.Strong(study.label(levels)), f" {ratio}"]
        contents.append(doc.paragraph(*spans, "."))
    metric = "tpot_ms_p50"
    means = study.means(metric)
    if study.baseline in means:
        runs = format_count(len(study.seeds), "run")
        time = fmt.format_metric(metric, means[study.baseline])
        spans = [f"A token takes the baseline {time} ms (median, batch 1, {runs} a cell)"]
        fastest = min(means, key=lambda levels: (means[levels], study.cell_index(levels)))
        if fastest != study.baseline:
            spans += ["; least it takes ", doc.Strong(study.label(fastest))]
            spans.append(f", {fmt.format_metric(metric, means[fastest])} ms")
            if study.timing_obstacle:
                spans.append(f". {study.timing_obstacle}, so this order is no finding")
        contents.append(doc.paragraph(*spans, "."))
    return [*contents, doc.paragraph(texts.fill("untrained weights"))]
