"""What a cell or a level differs in from what it is compared with, computed again by seed."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvlab.analysis.cell_comparisons import CellComparison
from kvlab.analysis.effects import Effect, change_name
from kvlab.analysis.matched_pairs import find_matched_corners
from kvlab.analysis.standard_errors import StandardError
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.analysis.verdicts import VERDICTS
from kvlab.cli.progress_display import ID_DIGITS
from kvlab.cli.terminal import format_table
from kvlab.humanize import format_count
from kvlab.report import formatting as fmt
from kvlab.report.table_columns import mean_and_spread
from kvlab.store.metrics import METRICS

Facts = dict[str, Any]
"""What `--json` prints: of a trial, a cell, a level, a difference or one of its terms."""

Answer = tuple[Facts, list[str], list[TrialRow]]
"""What a sweep says of a cell or a level: as JSON, as lines, and the trials behind it."""


def name_cell(study: Study, levels: Levels) -> dict[str, Any]:
    """Return the name of a cell, its levels and what they set, as JSON."""
    named = dict(zip(study.factors, levels, strict=True))
    patches = study.sweep.get("patches", {})
    settings = {factor: patches.get(factor, {}).get(level, {}) for factor, level in named.items()}
    label = study.label(levels)
    return {"sweep": study.name, "cell": label, "levels": named, "settings": settings}


def format_levels(cell: Mapping[str, Any]) -> Iterator[str]:
    """Yield the levels of a cell, and what each of them sets."""
    yield f"levels    {', '.join(f'{factor}={level}' for factor, level in cell['levels'].items())}"
    for factor, patch in cell["settings"].items():
        if patch:
            sets = fmt.format_settings(patch)
            yield f"          {factor}={cell['levels'][factor]} sets {sets}"


def explain_cell(study: Study, levels: Levels) -> Answer:
    """Explain the values of a cell, and its difference from its reference."""
    metric, rows = study.primary_metric, list(study.cells[levels].values())
    values = study.values(levels, metric)
    mean, spread = mean_and_spread(list(values.values())) if values else (None, None)
    found = study.comparisons.get(levels) if study.search is None else None
    cell = name_cell(study, levels)
    facts = {
        "kind": "cell",
        **cell,
        "metric": metric,
        "values": [
            {"seed": r.seed, "trial": r.trial, "status": r.status, "value": values.get(r.seed)}
            for r in rows
        ],
        "mean": mean,
        "standard_deviation": spread,
        "comparison": None,
    }
    lines = [f"cell {cell['cell']} of sweep {study.name}: {format_count(len(rows), 'trial')}"]
    lines += [*format_levels(cell), "", _name_metric(metric)]
    for row in rows:
        value = format_value(metric, values[row.seed]) if row.seed in values else row.status
        lines.append(f"seed {row.seed}: {value}  ({row.trial[:ID_DIGITS]})")
    if mean is not None:
        deviation = "" if spread is None else f", standard deviation {format_value(metric, spread)}"
        lines.append(f"mean of these = {format_value(metric, mean)}{deviation}")
    lines.append("")
    if found is not None:
        title = f"{study.label(levels)} minus {study.label(found.reference)}"
        weights = {levels: 1.0, found.reference: -1.0}
        notes = _note_comparison(study, found)
        facts["comparison"] = _explain_difference(study, found, title, weights, notes)
        rows += [study.cells[found.reference][seed] for seed in found.seeds]
        lines += _format_difference(facts["comparison"])
    elif study.search is not None:
        lines.append("trials of a search are not compared with a reference")
    elif study.estimand.reference(levels) == levels:
        lines.append("it is a reference, as it saves no byte: other cells are compared with it")
    else:
        lines.append("it has no seed in common with its reference, so nothing is compared")
    return facts, lines, rows


def explain_level(study: Study, factor: str, level: str) -> Answer:
    """Explain what a level does: its effect, or one for each kind of setting told apart."""
    effects, against = [], f"{factor}={study.factors[factor][0]}"
    for effect in study.effects(study.primary_metric):
        if effect.change != ((factor, level),):
            continue
        settings, weights = [], dict(effect.weights)
        if not effect.is_contrast:
            settings = list(_list_settings(study, effect))
            weights = {}
            for levels, weight in effect.weights.items():
                partner = _find_partner(study, factor, levels)
                if levels != partner:  # pairs side by side
                    weights |= {levels: weight, partner: effect.weights[partner]}
        title, notes = f"effect of {effect.name} against {against}", _note_effect(study, effect)
        effects.append(_explain_difference(study, effect, title, weights, notes, settings))
    name = f"{factor}={level}"
    facts = {"kind": "level", "sweep": study.name, "level": name, "against": against}
    lines = [f"level {name} of sweep {study.name}"]
    for one in effects:
        lines += ["", *_format_difference(one)]
    used = {term["trial"] for one in effects for term in one["terms"]}
    rows = {row.trial: row for row in study.rows if row.trial in used}
    return {**facts, "effects": effects}, lines, list(rows.values())


def _explain_difference(
    study: Study,
    found: CellComparison | Effect,
    title: str,
    weights: Mapping[Levels, float],
    notes: Iterable[str],
    settings: Sequence[Facts] = (),
) -> Facts:
    """Return all that the report says of a difference, and the terms behind it.

    At every seed the difference is the sum of weight times value, and then the mean over the seeds;
    or, where pairs are given up, that of the cells' means over all of their seeds.
    """
    metric, effect = study.primary_metric, found if isinstance(found, Effect) else found.effect
    error: StandardError | None = None
    if effect is not None and effect.is_tested:
        error = effect.tested_error
    elif found.estimate is not None and found.estimate.kind == "tested":
        error = StandardError(found.estimate.standard_error, found.estimate.df)
    terms, sums = [], list[float]()
    for seed in found.seeds:
        rows = [(study.cells[levels][seed], weight) for levels, weight in weights.items()]
        for row, weight in rows:
            term = {"seed": seed, "cell": study.label(row.levels), "trial": row.trial}
            terms.append({**term, "value": row.measurements[metric], "weight": weight})
        sums.append(math.fsum(weight * row.measurements[metric] for row, weight in rows))
    over_all_seeds = None
    if effect is not None and effect.error is not None and effect.error.shift:
        means = {levels: study.mean(levels, metric) or 0.0 for levels in effect.weights}
        over_all_seeds = math.fsum(w * means[levels] for levels, w in effect.weights.items())
    verdict, alpha = found.verdict_name, study.decide.alpha
    return {
        "title": title,
        "metric": metric,
        "value": None if found.estimate is None else found.value,
        "error": None if error is None else asdict(error),
        "interval": [found.low, found.high] if found.has_interval else None,
        "confidence": 100 * (1 - (found.alpha if isinstance(found, Effect) else alpha)),
        "family": "cells" if effect is None else "levels",
        "verdict": found.verdict,
        "meaning": VERDICTS[verdict].meaning if verdict else "",
        "terms": terms,
        "settings": list(settings),
        "notes": list(notes),
        "over_all_seeds": over_all_seeds,
        "by_seed": [{"seed": s, "difference": d} for s, d in zip(found.seeds, sums, strict=True)],
        "computed": math.fsum(sums) / len(sums) if sums else None,
        "own_error": statistics.stdev(sums) / math.sqrt(len(sums)) if len(sums) > 1 else None,
    }


def _note_comparison(study: Study, found: CellComparison) -> Iterator[str]:
    pairs = zip(study.factors, found.reference, study.baseline, strict=True)
    kept = [f"{factor}={level}" for factor, level, base in pairs if level != base]
    why = f", as {', '.join(kept)} saves no byte or is set as reference" if kept else ""
    yield f"its reference is {study.label(found.reference) if kept else 'the baseline'}{why}"
    if study.estimand.is_served_otherwise(found.levels):
        yield "it is served otherwise than it was trained"
    if found.effect is not None:
        yield f"it differs as {found.effect.name} does, and has the interval of that effect"
    if found.later is not None:
        over = format_count(len(found.seeds), "seed")
        yield f"over all seeds it is {found.later.value:+.4g}; the verdict is of the test at {over}"
    if wrong := study.count_wrong((found.levels, found.reference)):
        yield f"{format_count(wrong, 'training')} of the two cells went wrong"


def _note_effect(study: Study, effect: Effect) -> Iterator[str]:
    if effect.is_contrast:
        yield "no two cells differ in this level alone: a weighted sum of all cells (least squares)"
        if effect.aliases:
            yield f"it is aliased with {'; '.join(map(change_name, effect.aliases))}"
    elif study.estimand.changes_serving_alone(effect.change):
        yield "a level of serving: each setting against the same weights served as trained"
    elif study.decide.over:
        over = ", ".join(f"{name}={'|'.join(levels)}" for name, levels in study.decide.over.items())
        yield f"the mean over the settings with {over}, as decide.over declares"
    else:
        yield "the mean over the settings that are served as they were trained"
    if study.tests is not None and (judged := study.tests.describe(effect)):
        yield f"judged at {judged}"
    if effect.went_wrong:
        yield f"{format_count(effect.went_wrong, 'training')} of these cells went wrong"


def _list_settings(study: Study, effect: Effect) -> Iterator[Facts]:
    """Yield the settings that an effect is the mean over, and those that it leaves out.

    Where settings are told apart, those of other effects are not listed.
    """
    factor, level = effect.change[0]
    place = list(study.factors).index(factor)
    matched = list(find_matched_corners(study.cells, study.factors, effect.change))
    entering = {corners[0][1] for corners in study.estimand.select(matched)}
    means = dict(effect.by_setting)
    for levels in study.cells:
        named = dict(zip(study.factors, levels, strict=True))
        if named[factor] != level or any(named[other] != at for other, at in effect.at):
            continue
        partner = _find_partner(study, factor, levels)
        others, why = (*levels[:place], *levels[place + 1 :]), ""
        if others not in means:
            why = _say_left_out(study, levels, partner, is_chosen=levels in entering)
        yield {
            "cell": study.label(levels),
            "partner": study.label(partner),
            "difference": means.get(others),
            "weight": effect.weights.get(levels, 0.0),
            "left_out": why,
        }


def _find_partner(study: Study, factor: str, levels: Levels) -> Levels:
    """Return the cell with the baseline's level of one factor; the design may lack it."""
    named = {**dict(zip(study.factors, levels, strict=True)), factor: study.factors[factor][0]}
    return tuple(named.values())


def _say_left_out(study: Study, levels: Levels, partner: Levels, *, is_chosen: bool) -> str:
    """Return why a setting is not part of an effect."""
    if partner not in study.cells:
        return f"the design has no cell {study.label(partner)}"
    if not is_chosen:
        if study.estimand.is_served_otherwise(partner):
            return "served otherwise than it was trained"
        return "decide.over leaves it out"
    if diverged := [study.label(c) for c in (levels, partner) if c in study.diverged_cells]:
        return f"a training of {' and of '.join(diverged)} diverged"
    metric = study.primary_metric
    seeds = sorted(study.values(levels, metric).keys() & study.values(partner, metric).keys())
    listed = ", ".join(map(str, seeds))
    return f"both cells have values at seeds {listed} only" if seeds else "no seed has both values"


def _name_metric(metric: str) -> str:
    unit = fmt.display_unit(metric)
    return f"{METRICS[metric].title} ({metric}{unit and f', {unit}'})"


def format_value(metric: str, value: float, form: str = ".8g") -> str:
    """Return a value in the unit that reports print it in."""
    return f"{fmt.in_display_unit(metric, value):{form}}"


def _format_difference(one: Facts) -> Iterator[str]:
    """Yield what is compared, the values, the sums, and what the report says of them."""
    metric, unit = one["metric"], f" {fmt.difference_unit(one['metric'])}".rstrip()
    yield f"{one['title']}, in {_name_metric(metric)}"
    yield from (f"  {note}" for note in one["notes"])
    if one["settings"]:
        rows = [["setting", "minus", "weight", "difference"]]
        for use in one["settings"]:
            weight, difference = f"{use['weight']:.4g}" if use["weight"] else "", use["left_out"]
            if use["difference"] is not None:
                difference = format_value(metric, use["difference"], "+.8g")
            rows.append([use["cell"], use["partner"], weight, difference])
        yield from ("", format_table(rows, "llr"))
    sums = one["by_seed"]
    if sums:
        yield from ("", _format_terms(metric, one["terms"]), "")
        for by_seed in sums if len(one["terms"]) > 2 * len(sums) else ():
            value = format_value(metric, by_seed["difference"], "+.8g")
            yield f"seed {by_seed['seed']}: sum of weight x value = {value}"
        count = format_count(len(sums), "seed")
        yield f"mean over {count} = {format_value(metric, one['computed'])}{unit}"
        if one["over_all_seeds"] is not None:
            value = format_value(metric, one["over_all_seeds"])
            text = f"difference of means over all seeds = {value}{unit}"
            yield f"{text}; it is used, as pairing by seeds gains nothing here"
    value, error = one["value"], one["error"]
    if value is not None and error is not None:
        own = one["own_error"]
        text = f"standard error = {format_value(metric, error['value'], '.4g')}"
        if own is not None and error["value"] > own * (1 + 1e-9):
            text += f", pooled; that of these seeds alone is {format_value(metric, own, '.4g')}"
        yield f"{text}; {error['df']:.3g} degrees of freedom"
        if one["interval"] is not None:
            low, high = one["interval"]
            reach = max(high - value, value - low) / error["value"]
            text = f"{fmt.format_interval(metric, low, high)}, for all {one['family']} together:"
            text += f" {reach:.3g} standard errors to each side"
            if 0.0 in one["interval"]:
                text += ", but cut at 0, as a later step of Holm's method finds a difference"
            yield f"{one['confidence']:g}% interval = {text}"
    text = "" if value is None else f"{fmt.format_difference(metric, value)}: "
    meaning = one["meaning"] and f" ({one['meaning']})"
    yield f"verdict = {text}{one['verdict'] or 'none'}{meaning}"


def _format_terms(metric: str, terms: Sequence[Facts]) -> str:
    """Return the terms as a table: two by two where they are differences of pairs."""

    def show(term: Facts) -> list[str]:
        return [term["cell"], term["trial"][:ID_DIGITS], format_value(metric, term["value"])]

    pairs = list(zip(terms[::2], terms[1::2], strict=False))
    if all(a["seed"] == b["seed"] and abs(a["weight"] + b["weight"]) < 1e-12 for a, b in pairs):
        head = ["seed", "cell", "trial", "value", "minus", "trial", "value", "difference", "weight"]
        rows = []
        for a, b in pairs:
            ends = [format_value(metric, a["value"] - b["value"], "+.8g"), f"{a['weight']:+.4g}"]
            rows.append([str(a["seed"]), *show(a), *show(b), *ends])
        return format_table([head, *rows], "rllrllrrr")
    rows = [[str(term["seed"]), *show(term), f"{term['weight']:+.4g}"] for term in terms]
    return format_table([["seed", "cell", "trial", "value", "weight"], *rows], "rllrr")
