"""`kvlab explain`: what a trial, a cell or a level is computed from, and where its files are."""

import argparse
import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from typing import Any

from kvlab.analysis.cell_comparisons import CellComparison
from kvlab.analysis.effects import Effect, change_name
from kvlab.analysis.matched_pairs import find_matched_corners
from kvlab.analysis.standard_errors import StandardError
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.analysis.verdicts import VERDICTS
from kvlab.cli.progress_display import ID_DIGITS
from kvlab.cli.shared_arguments import ALL_SWEEPS, add_record, open_store, sweep_name
from kvlab.cli.terminal import format_table, print_result
from kvlab.errors import RecordDamaged, StoreError, UsageError
from kvlab.humanize import format_count, sanitize_line, suggest_name
from kvlab.report import formatting as fmt
from kvlab.report.table_columns import mean_and_spread
from kvlab.store import Store, record_forms, verification
from kvlab.store.metrics import METRICS
from kvlab.store.result import flatten

MAX_NAMES = 12
"""Names that a message lists."""

EPILOG = """\
TRIAL is an id or its first digits. CELL is the name of a cell in the report, or its levels that
differ from the baseline's. FACTOR=LEVEL is the effect of a level, averaged over the settings of the
other factors. Every number is computed again, and the files of every trial are checked. The exit
code is 1 if a file is damaged.

examples:
  kvlab explain 3f2a                      (a trial, by the first digits of its id)
  kvlab explain quickstart mqa+hybrid     (a cell of a sweep, by its name in the report)
  kvlab explain quickstart heads=mqa      (what a level does)
"""

CACHED = {
    "done": "yes: a sweep that asks for this trial takes its result",
    "failed": "yes: it is run again by `kvlab submit --retry-failed` alone",
    "diverged": "yes: it is not run again",
    "pruned": "for searches that prune: any other sweep continues its training",
    "damaged": "no: its result is not what was written, so the next `kvlab submit` makes it again",
    "not ended": "no: it has no result yet",
}
"""Status of a trial -> whether a sweep runs it again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_record(parser, ALL_SWEEPS, archive=True)
    parser.add_argument("what", metavar="TRIAL|CELL|FACTOR=LEVEL")


Facts = dict[str, Any]
"""What `--json` prints: of a trial, a cell, a level, a difference or one of its terms."""

Answer = tuple[Facts, list[str], list[TrialRow]]
"""What a sweep says of a cell or a level: as JSON, as lines, and the trials behind it."""


def run(options: argparse.Namespace) -> int:
    store, text = open_store(options.store), options.what.strip()
    studies = []
    if options.sweep is not None:
        studies = [Study.load(store, sweep_name(options.sweep))]
    for name in store.sweep_names() if options.sweep is None else ():
        try:
            studies.append(Study.load(store, name))
        except RecordDamaged as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    trial = _find_trial(store, studies, text, options.sweep)
    if trial is not None:
        about, lines = _explain_trial(store, studies, _read_origin(store, trial))
        print_result(options, [about], "\n".join(lines))
        return int(any(_list_problems([about]).values()))
    if not studies:
        raise UsageError(f"{store.path} holds no sweep yet; name another store with --store")
    read, facts, lines, is_damaged = cache(partial(_read_origin, store)), [], [], False
    for study in studies:
        with record_forms.refuse_malformed(study.name):
            answer = _look_up(study, text)
        if answer is None:
            continue
        about, own_lines, rows = answer
        origins = [read(trial) for trial in dict.fromkeys(row.trial for row in rows) if trial]
        facts.append({**about, "trials": origins})
        problems = _list_problems(origins)
        is_damaged = is_damaged or any(problems.values())
        count = f"{list(problems.values()).count('')} of {len(problems)} verify"
        lines += [*own_lines, "", *_format_damage(problems)]
        lines.append(f"files     {count}; `kvlab explain TRIAL` lists those of a trial")
    if not facts:
        raise UsageError(sanitize_line(_describe_unknown(store, studies, text)))
    print_result(options, facts, "\n".join(lines))
    return int(is_damaged)


def _list_problems(origins: Iterable[Facts]) -> dict[str, str]:
    """Return path -> problem of the files of trials; the problem is empty if there is none."""
    return {file["path"]: file["problem"] for one in origins for file in one["files"]}


def _format_damage(problems: Mapping[str, str]) -> Iterator[str]:
    yield from (f"DAMAGED   {path}: {problem}" for path, problem in problems.items() if problem)


def _find_trial(store: Store, studies: Sequence[Study], text: str, sweep: str | None) -> str | None:
    """Return the trial whose id begins with a text; None if there is none.

    Raises:
        UsageError: Several do, and no cell or level has this name.
    """
    ids = {row.trial for study in studies for row in study.rows if row.trial}
    ids |= set() if sweep else set(store.trial_ids())
    matches = sorted(one for one in ids if one.startswith(text.lower()))
    if len(matches) > 1 and not any(_look_up(study, text) for study in studies):
        shown = ", ".join(matches[:3]) + (", ..." if len(matches) > 3 else "")
        raise UsageError(f"{text} fits {len(matches)} trials ({shown}); give more digits")
    return matches[0] if len(matches) == 1 else None


def _look_up(study: Study, text: str) -> Answer | None:
    """Return what a sweep says of a level or a cell; None if it has neither of this name."""
    factor, _, level = text.partition("=")
    if study.search is None and level in study.factors.get(factor, ())[1:]:
        return _explain_level(study, factor, level)
    levels = _find_cell(study, text)
    return None if levels is None else _explain_cell(study, levels)


def _find_cell(study: Study, text: str) -> Levels | None:
    """Return the cell of a name: as in reports, or by its levels that are not the baseline's."""
    for levels in study.cells:
        if study.label(levels) == text:
            return levels
    changes: dict[str, str] = {}
    pairs = [(factor, level) for factor, own in study.factors.items() for level in own]
    words = [word for word in re.split(r"[\s,+]+", text) if word]
    for word in words:
        named = [pair for pair in pairs if word in (pair[1], "=".join(pair))]
        if len(named) != 1 or named[0][0] in changes:
            return None
        changes.update(named)
    own = zip(study.factors, study.baseline, strict=True)
    levels = tuple(changes.get(factor, base) for factor, base in own)
    is_level = len(words) == 1 and "=" in text  # the baseline's level, which has no effect
    return levels if levels in study.cells and words and not is_level else None


def _describe_unknown(store: Store, studies: Sequence[Study], text: str) -> str:
    """Say that nothing has a name, and what to write instead."""
    names = [s.label(levels) for s in studies for levels in s.cells]
    for study in (one for one in studies if one.search is None):
        factor, _, level = text.partition("=")
        if level and level == study.factors.get(factor, ("",))[0]:
            rule = f"{text} is the baseline's level of {study.name}, which others are compared with"
            others = [f"{factor}={one}" for one in study.factors[factor][1:]]
            return f"{rule}; explain {', '.join(others) or 'the cell baseline'}"
        names += [f"{factor}={level}" for factor, own in study.factors.items() for level in own[1:]]
    names = list(dict.fromkeys(names))
    sweeps = ", ".join(study.name for study in studies)
    where = f"{text} is no trial of {store.path}, and no cell or level of {sweeps}"
    if re.match(r"[-+\u2212<]?\d", text):
        where += "; for a number of a report, give the cell or the level of its row"
    listed = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
    return f"{where}; {suggest_name(text, names, f'use {listed}')}"


# Trials


def _explain_trial(
    store: Store, studies: Sequence[Study], origin: Facts
) -> tuple[Facts, list[str]]:
    """Return how a trial ended, what it is in each sweep, its files and what it recorded."""
    trial, training = origin["trial"], origin["training"]
    own = [(s, row) for s in studies for row in s.rows if row.trial == trial]
    measured = next((row.measurements for _, row in own if row.is_done), {})
    rows = [row for s in studies for row in s.rows]
    sharing = {row.trial for row in rows if training and row.training == training}
    folders = [
        store.trial_directory(trial),
        *(store.attempt_directory(trial, number) for number in store.attempts(trial)),
        *([store.training_directory(training)] if training else []),
    ]
    facts = {
        "kind": "trial",
        "cells": [{**_name_cell(s, row.levels), "seed": row.seed} for s, row in own],
        "cached": CACHED[origin["status"]],
        "same_weights": sorted(sharing - {trial}),
        "folders": [str(path) for path in folders if path.exists()],
        "measurements": {name: measured[name] for name in METRICS.sort(measured)},
        **origin,
    }
    cells = "; ".join(f"{s.name}: {s.label(row.levels)} seed={row.seed}" for s, row in own)
    lines = [f"trial {trial}: {origin['status']}; {cells or 'in no cell of these sweeps'}"]
    for cell in facts["cells"]:
        lines += _format_levels(cell)
    lines.append(f"cached    {facts['cached']}")
    if shared := ", ".join(one[:ID_DIGITS] for one in facts["same_weights"]):
        lines.append(f"weights   also those of {shared}")
    lines += [f"folder    {path}" for path in facts["folders"]]
    lines += _format_origin(origin)
    recorded = [
        [name, _show(name, value, ".10g"), fmt.display_unit(name), METRICS[name].title]
        for name, value in facts["measurements"].items()
    ]
    if recorded:
        lines += ["", format_table([["recorded", "value", "unit", "what it is"], *recorded], "lr")]
    return facts, lines


def _read_origin(store: Store, trial: str) -> Facts:
    """Check the files of a trial, and read what its result says of its making."""
    files, notes = verification.list_trial_files(store, trial)
    try:
        result = store.result(trial) or {}
    except StoreError:
        result = {}
    made = dict(result.get("provenance") or {})
    if made:
        made["text"] = (result["experiment"].get("data") or {}).get("source")
        made["weights"] = ((result.get("training_record") or {}).get("start") or {}).get("source")
    return {
        "trial": trial,
        "training": str(result.get("training") or ""),
        "status": store.status(trial) or "not ended",
        "made": {name: value for name, value in flatten(made) if value is not None},
        "files": files,
        "notes": list(notes),
    }


def _format_origin(one: Facts) -> Iterator[str]:
    """Yield what a trial was made from, and its files."""
    if one["training"]:
        yield f"training  {one['training']}"
    yield f"made      {'by' if one['made'] else 'not recorded, as there is no whole result'}"
    width = max(map(len, one["made"]), default=0)
    yield from (f"  {name:<{width}}  {value}" for name, value in one["made"].items())
    yield from (f"note      {note}" for note in one["notes"])
    yield from _format_damage(_list_problems([one]))
    yield "files     verified now; of .json files the seal at their end"
    whole = (file for file in one["files"] if not file["problem"])
    yield from (f"  {file['sha256']}  {file['path']}" for file in whole)


def _name_cell(study: Study, levels: Levels) -> dict[str, Any]:
    named = dict(zip(study.factors, levels, strict=True))
    patches = study.sweep.get("patches", {})
    settings = {factor: patches.get(factor, {}).get(level, {}) for factor, level in named.items()}
    label = study.label(levels)
    return {"sweep": study.name, "cell": label, "levels": named, "settings": settings}


def _format_levels(cell: Mapping[str, Any]) -> Iterator[str]:
    """Yield the levels of a cell, and what each of them sets."""
    yield f"levels    {', '.join(f'{factor}={level}' for factor, level in cell['levels'].items())}"
    for factor, patch in cell["settings"].items():
        if patch:
            settings = ", ".join(f"{key}: {value}" for key, value in patch.items())
            yield f"          {factor}={cell['levels'][factor]} sets {settings}"


# Cells and levels


def _explain_cell(study: Study, levels: Levels) -> Answer:
    metric, rows = study.primary_metric, list(study.cells[levels].values())
    values = study.values(levels, metric)
    mean, spread = mean_and_spread(list(values.values())) if values else (None, None)
    found = study.comparisons.get(levels) if study.search is None else None
    cell = _name_cell(study, levels)
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
    lines += [*_format_levels(cell), "", _name_metric(metric)]
    for row in rows:
        value = _show(metric, values[row.seed]) if row.seed in values else row.status
        lines.append(f"seed {row.seed}: {value}  ({row.trial[:ID_DIGITS]})")
    if mean is not None:
        deviation = "" if spread is None else f", standard deviation {_show(metric, spread)}"
        lines.append(f"mean of these = {_show(metric, mean)}{deviation}")
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


def _explain_level(study: Study, factor: str, level: str) -> Answer:
    """Explain what a level does: its effect, or one for each kind of setting told apart."""
    effects, base = [], study.factors[factor][0]
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
        title, notes = (
            f"effect of {effect.name} against {factor}={base}",
            _note_effect(study, effect),
        )
        effects.append(_explain_difference(study, effect, title, weights, notes, settings))
    name = f"{factor}={level}"
    facts = {"kind": "level", "sweep": study.name, "level": name, "against": f"{factor}={base}"}
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


def _show(metric: str, value: float, form: str = ".8g") -> str:
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
                difference = _show(metric, use["difference"], "+.8g")
            rows.append([use["cell"], use["partner"], weight, difference])
        yield from ("", format_table(rows, "llr"))
    sums = one["by_seed"]
    if sums:
        yield from ("", _format_terms(metric, one["terms"]), "")
        for by_seed in sums if len(one["terms"]) > 2 * len(sums) else ():
            value = _show(metric, by_seed["difference"], "+.8g")
            yield f"seed {by_seed['seed']}: sum of weight x value = {value}"
        count = format_count(len(sums), "seed")
        yield f"mean over {count} = {_show(metric, one['computed'])}{unit}"
        if one["over_all_seeds"] is not None:
            value = _show(metric, one["over_all_seeds"])
            text = f"difference of means over all seeds = {value}{unit}"
            yield f"{text}; it is used, as pairing by seeds gains nothing here"
    value, error = one["value"], one["error"]
    if value is not None and error is not None:
        own, text = one["own_error"], f"standard error = {_show(metric, error['value'], '.4g')}"
        if own is not None and error["value"] > own * (1 + 1e-9):
            text += f", pooled; that of these seeds alone is {_show(metric, own, '.4g')}"
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
        return [term["cell"], term["trial"][:ID_DIGITS], _show(metric, term["value"])]

    pairs = list(zip(terms[::2], terms[1::2], strict=False))
    if all(a["seed"] == b["seed"] and abs(a["weight"] + b["weight"]) < 1e-12 for a, b in pairs):
        head = ["seed", "cell", "trial", "value", "minus", "trial", "value", "difference", "weight"]
        rows = []
        for a, b in pairs:
            ends = [_show(metric, a["value"] - b["value"], "+.8g"), f"{a['weight']:+.4g}"]
            rows.append([str(a["seed"]), *show(a), *show(b), *ends])
        return format_table([head, *rows], "rllrllrrr")
    rows = [[str(term["seed"]), *show(term), f"{term['weight']:+.4g}"] for term in terms]
    return format_table([["seed", "cell", "trial", "value", "weight"], *rows], "rllrr")
