"""The answer: the sweep's question, and sentences that answer it from the numbers."""

import math
from dataclasses import replace
from functools import partial

from kvlab.analysis.effects import Effect
from kvlab.analysis.statistics import t_quantile
from kvlab.analysis.study import GAP_ROUNDING, Study
from kvlab.analysis.trial_rows import is_time
from kvlab.analysis.verdicts import VERDICTS
from kvlab.humanize import format_bytes
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.report.benchmark_plots import cell_experiment
from kvlab.report.hellaswag_outcomes import COMPARED_METRICS, all_at_chance
from kvlab.report.overview import list_close_to_margin, report_overview
from kvlab.report.record_warnings import list_confounds, list_warnings, report_damage
from kvlab.spec import Experiment
from kvlab.store.metrics import METRICS

MAX_NAMED_LEVELS = 4
"""Levels that each list names individually."""

MAX_SEEDS = 100
"""Seeds above which the answer does not say how many would decide a level."""


def report_answer(study: Study) -> doc.Section:
    """Answer the sweep's question."""
    contents: list[doc.Content] = [doc.paragraph(doc.Strong(str(study.sweep["question"])))]
    counts = study.status_counts
    contents += report_damage(study)
    overview = report_overview(study)
    if study.is_untrained:
        contents += [*overview, *_answer_untrained(study)]
    elif not study.done_rows:
        contents += overview
    else:
        bigram, is_noise = _compare_with_bigrams(study)
        gaps = list[doc.Content]()
        if study.serving_gaps:
            furthest, gap = max(study.serving_gaps.items(), key=lambda item: abs(item[1].value))
            fields = {"name": study.label(furthest), "is_zero": abs(gap.value) < GAP_ROUNDING}
            gaps.append(texts.write("largest gap", gap=gap, **fields))
        confidence = _describe_confidence(study)
        findings = [*overview, *_describe_cost(study), *gaps, confidence]
        # models that measure noise are said before what they would show
        contents += [*bigram, *findings] if is_noise else [*findings, *bigram]
        contents += _describe_unused_context(study)
    others = {state: count for state, count in counts.items() if state != "done"}
    if set(others) - {"pruned"}:  # a search that prunes leaves no more than that
        contents.append(texts.write("partial", study=study, others=others))
    if not study.is_untrained and any(e.aliases for e in study.effects(study.primary_metric)):
        contents.append(texts.write("aliased levels"))
    contents += [doc.Paragraph(note) for note in list_confounds(study)]
    return doc.Section("The answer", (*contents, *list_warnings(study)))


def _describe_cost(study: Study) -> list[doc.Content]:
    """State the baseline, and list the levels of every verdict, the largest differences first."""
    metric = study.primary_metric
    base, value = study.mean(study.baseline, metric), ""
    if base is not None:
        unit = fmt.display_unit(metric)
        value = f"{fmt.format_metric(metric, base)}{'' if unit == '%' else ' '}{unit}".strip()
        if (of_text := cols.text_metric(study, base)) is not None:
            unit, number = of_text[0], fmt.format_significant(of_text[1], 4)
            value += f" ({f'{number} {unit}' if unit == 'bits/byte' else f'{unit} {number}'})"
    effects = [e for e in study.effects(metric) if e.estimate or e.verdict_name == "diverged"]
    start = texts.write("baseline", study=study, value=value, effects=effects)
    groups: dict[str, list[Effect]] = {}
    for effect in sorted(effects, key=lambda effect: -abs(effect.value)):
        groups.setdefault(effect.verdict_name, []).append(effect)
    bullets = tuple(_name_levels(study, groups[name]) for name in VERDICTS if name in groups)
    close = list_close_to_margin(study)
    return [
        start,
        *([doc.Bullets(bullets)] if bullets else []),
        *([texts.write("close to the margin", study=study, close=close)] if close else []),
    ]


def _name_levels(study: Study, effects: list[Effect]) -> tuple[doc.Span, ...]:
    """Name the levels of one verdict, the largest differences first, and count the others."""
    words = fmt.capitalize(effects[0].verdict)
    most = MAX_NAMED_LEVELS if len(effects) > MAX_NAMED_LEVELS + 1 else len(effects)
    named = []
    for number, effect in enumerate(effects[:most]):
        difference = ""
        if effect.estimate:
            show = fmt.format_difference if number else fmt.difference_with_unit
            difference = show(effect.metric, effect.value)
        named.append((effect.name, difference))
    is_open = effects[0].verdict_name in ("within noise", "undecided")
    is_open = is_open and study.tests is None
    seeds = min(filter(None, map(_seeds_to_decide, effects)), default=0) if is_open else 0
    fields = {"n": len(effects), "is_open": is_open, "seeds": seeds, "most": MAX_SEEDS}
    return texts.spans("levels of a verdict", verdict=words, named=named, **fields)


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


def _describe_confidence(study: Study) -> doc.Paragraph:
    """Say what this number of seeds can find, and which measurements are no finding.

    These are disturbed times and accuracies at chance.
    """
    metric = study.primary_metric
    effects = study.effects(metric)
    detectable = [e.detectable for e in effects if e.detectable is not None]
    blind = [e for e in effects if e.is_tested and e.tested_error.df >= 2 and e.detectable is None]
    claimed = [effect for effect in effects if effect.is_claimed]
    accuracies = [m for m in study.measured_metrics if m in COMPARED_METRICS]
    fields = {
        "is_decided": claimed and all(VERDICTS[e.verdict_name].concludes for e in claimed),
        "limit": fmt.format_ends(detectable, partial(fmt.format_magnitude, metric)),
        "n_blind": len(blind),
        "is_timed": any(map(is_time, study.measured_metrics)),
        "is_at_chance": accuracies and all_at_chance(study, accuracies),
    }
    return texts.write("confidence", study=study, effects=effects, claimed=claimed, **fields)


def _compare_with_bigrams(study: Study) -> tuple[list[doc.Paragraph], bool]:
    """Compare the models with a bigram table of the text that they were trained on.

    Returns:
        What is said of it, and whether a model does not beat its table.
    """
    by_training = {  # cells that are served in several ways are one model
        row.training: (row.measurements["loss"], row.measurements["loss_bigram"])
        for row in study.done_rows
        if {"loss", "loss_bigram"} <= row.measurements.keys()
    }
    pairs = list(by_training.values())
    if not pairs:
        return [], False
    mean = math.fsum(table for _, table in pairs) / len(pairs)
    losing = [loss for loss, table in pairs if loss >= table]
    closest = min(table - loss for loss, table in pairs)
    fields = {"table": mean, "best": min(pairs)[0], "closest": closest}
    return [texts.write("bigram table", losing=losing, n=len(pairs), **fields)], bool(losing)


def _describe_unused_context(study: Study) -> list[doc.Paragraph]:
    """Say which cells are better than a reference that sees more tokens, and is else the same."""
    blind = []
    if study.primary_metric.startswith(("loss", "bits_per_byte")):
        for levels, found in study.comparisons.items():
            own, base = (cell_experiment(study, one) for one in (levels, found.reference))
            if found.verdict_name == "better" and own and base and _sees_less(own, base):
                blind.append(found)
    if not blind:
        return []
    best = min(blind, key=lambda one: -abs(one.value))
    references = {one.reference for one in blind}
    reference = f"**{study.label(best.reference)}**"
    if references == {study.baseline}:
        reference = "the baseline"
    elif len(references) > 1:
        reference = "their references"
    fields = {"n": len(blind), "name": study.label(best.levels), "reference": reference}
    return [texts.write("context without gain", **fields)]


def _sees_less(own: Experiment, base: Experiment) -> bool:
    """Whether layers see fewer tokens, and nothing else but a tuned rate differs."""

    def rest(one: Experiment) -> tuple[object, ...]:
        layers = [replace(n, kind="", window=None, sink_tokens=0) for n in one.model.layers]
        kept = {"window", "attention_pattern", "sink_tokens", "local", "global_", "kinds"}
        rates = {"learning_rate", "final_learning_rate"}
        model, training = one.model.model_dump(exclude=kept), one.training.model_dump(exclude=rates)
        return layers, model, training, one.serving

    seen = [sum(n.visible_tokens(one.model.block_size) for n in one.model.layers)
            for one in (own, base)]  # fmt: skip
    return seen[0] < seen[1] and rest(own) == rest(base)


def _answer_untrained(study: Study) -> list[doc.Paragraph]:
    """Compare what layouts store and how fast they decode, where no weights are trained."""
    contents: list[doc.Paragraph] = []
    base = study.kv_bytes(study.baseline)
    if base is not None:
        factors = {c: n for c in study.cells if (n := study.size_factor(c)) and n > 1}
        order = sorted(factors, key=lambda levels: factors[levels])
        smaller = [(study.label(c), fmt.format_ratio(factors[c])) for c in order]
        contents.append(
            texts.write(
                "sizes without training",
                held=format_bytes(base),
                smaller=smaller,
                several=len(study.estimand.references) > 1,
            )
        )
    metric = "tpot_ms_p50"
    means = study.means(metric)
    if study.baseline in means:
        fastest = min(means, key=lambda levels: (means[levels], study.cell_index(levels)))
        times = [fmt.format_metric(metric, means[one]) for one in (study.baseline, fastest)]
        fields = {"times": times, "fastest": fastest}
        contents.append(texts.write("times without training", study=study, **fields))
    return [*contents, texts.write("untrained weights")]
