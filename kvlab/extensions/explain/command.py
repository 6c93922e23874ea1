"""`kvlab explain`: what a trial, a cell or a level is computed from, and where its files are."""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.cli.progress_display import ID_DIGITS
from kvlab.cli.shared_arguments import ALL_SWEEPS, add_record, open_store, sweep_name
from kvlab.cli.terminal import format_table, print_result
from kvlab.errors import RecordDamaged, StoreError, UsageError
from kvlab.extensions.explain.explanation import Explanation, Term, explain_cell, explain_level
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


Answer = tuple[dict[str, Any], list[str], list[TrialRow]]
"""What a sweep says of a cell or a level: as JSON, as lines, and the trials behind it."""


Origin = dict[str, Any]
"""What a trial was made from, as `--json` prints it; its files with their sha256 and problems."""


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
    read, facts, lines = cache(partial(_read_origin, store)), [], []
    is_damaged = False
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


def _list_problems(origins: Iterable[Origin]) -> dict[str, str]:
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
    store: Store, studies: Sequence[Study], origin: Origin
) -> tuple[dict[str, Any], list[str]]:
    """Return how a trial ended, what it is in each sweep, its files and what it recorded."""
    trial, training = origin["trial"], origin["training"]
    own = [(s, row) for s in studies for row in s.rows if row.trial == trial]
    measured = next((row.measurements for _, row in own if row.is_done), {})
    sharing = {
        row.trial for s in studies for row in s.rows if training and row.training == training
    }
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
    cells = [f"{s.name}: {s.label(row.levels)} seed={row.seed}" for s, row in own]
    lines = [
        f"trial {trial}: {origin['status']}; {'; '.join(cells) or 'in no cell of these sweeps'}"
    ]
    for cell in facts["cells"]:
        lines += _format_levels(cell)
    lines.append(f"cached    {facts['cached']}")
    if shared := ", ".join(one[:ID_DIGITS] for one in facts["same_weights"]):
        lines.append(f"weights   also those of {shared}")
    lines += [f"folder    {path}" for path in facts["folders"]]
    lines += _format_origin(origin)
    rows = [["recorded", "value", "unit", "what it is"]]
    for name, value in facts["measurements"].items():
        shown = f"{fmt.in_display_unit(name, value):.10g}"
        rows.append([name, shown, fmt.display_unit(name), METRICS[name].title])
    if len(rows) > 1:
        lines += ["", format_table(rows, "lr")]
    return facts, lines


def _read_origin(store: Store, trial: str) -> Origin:
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


def _format_origin(one: Origin) -> Iterator[str]:
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
    found = explain_cell(study, levels)
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
        "comparison": None if found is None else found.as_dict(),
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
        compared = study.comparisons[levels]
        rows += [study.cells[compared.reference][seed] for seed in compared.seeds]
        lines += _format_explanation(found)
    elif study.search is not None:
        lines.append("trials of a search are not compared with a reference")
    elif study.estimand.reference(levels) == levels:
        lines.append("it is a reference, as it saves no byte: other cells are compared with it")
    else:
        lines.append("it has no seed in common with its reference, so nothing is compared")
    return facts, lines, rows


def _explain_level(study: Study, factor: str, level: str) -> Answer:
    parts = explain_level(study, factor, level)
    facts = {
        "kind": "level",
        "sweep": study.name,
        "level": f"{factor}={level}",
        "against": f"{factor}={study.factors[factor][0]}",
        "effects": [part.as_dict() for part in parts],
    }
    lines = [f"level {factor}={level} of sweep {study.name}"]
    for part in parts:
        lines += ["", *_format_explanation(part)]
    used = {term.trial for part in parts for term in part.terms}
    rows = {row.trial: row for row in study.rows if row.trial in used}
    return facts, lines, list(rows.values())


def _name_metric(metric: str) -> str:
    unit = fmt.display_unit(metric)
    return f"{METRICS[metric].title} ({metric}{unit and f', {unit}'})"


def _show(metric: str, value: float, form: str = ".8g") -> str:
    return f"{fmt.in_display_unit(metric, value):{form}}"


def _format_explanation(one: Explanation) -> Iterator[str]:
    """Yield what is compared, the values, the sums, and what the report says of them."""
    metric = one.metric
    yield f"{one.title}, in {_name_metric(metric)}"
    yield from (f"  {note}" for note in one.notes)
    if one.settings:
        rows = [["setting", "minus", "weight", "difference"]]
        for use in one.settings:
            weight = f"{use.weight:.4g}" if use.weight else ""
            difference = use.left_out
            if use.difference is not None:
                difference = _show(metric, use.difference, "+.8g")
            rows.append([use.cell, use.partner, weight, difference])
        yield from ("", format_table(rows, "llr"))
    if one.computed is not None:
        yield from ("", _format_terms(one), "")
        sums = one.by_seed
        if len(one.terms) > 2 * len(sums):
            for seed, value in sums.items():
                yield f"seed {seed}: sum of weight x value = {_show(metric, value, '+.8g')}"
        unit = f" {fmt.difference_unit(metric)}".rstrip()
        count = format_count(len(sums), "seed")
        yield f"mean over {count} = {_show(metric, one.computed)}{unit}"
        if one.over_all_seeds is not None:
            text = f"difference of means over all seeds = {_show(metric, one.over_all_seeds)}{unit}"
            yield f"{text}; it is used, as pairing by seeds gains nothing here"
    yield from _format_judgement(one)


def _format_terms(one: Explanation) -> str:
    """Return the terms as a table: two by two where they are differences of pairs."""
    metric = one.metric

    def show(term: Term) -> list[str]:
        return [term.cell, term.trial[:ID_DIGITS], _show(metric, term.value)]

    pairs = list(zip(one.terms[::2], one.terms[1::2], strict=False))
    if all(a.seed == b.seed and abs(a.weight + b.weight) < 1e-12 for a, b in pairs):
        head = ["seed", "cell", "trial", "value", "minus", "trial", "value", "difference", "weight"]
        rows = []
        for a, b in pairs:
            difference = _show(metric, a.value - b.value, "+.8g")
            rows.append([str(a.seed), *show(a), *show(b), difference, f"{a.weight:+.4g}"])
        return format_table([head, *rows], "rllrllrrr")
    rows = [[str(term.seed), *show(term), f"{term.weight:+.4g}"] for term in one.terms]
    return format_table([["seed", "cell", "trial", "value", "weight"], *rows], "rllrr")


def _format_judgement(one: Explanation) -> Iterator[str]:
    """Yield the standard error, the interval and the verdict of a difference."""
    metric, value, error = one.metric, one.value, one.error
    if value is not None and error is not None:
        own, text = one.own_error, f"standard error = {_show(metric, error.value, '.4g')}"
        if own is not None and error.value > own * (1 + 1e-9):
            text += f", pooled; that of these seeds alone is {_show(metric, own, '.4g')}"
        yield f"{text}; {error.df:.3g} degrees of freedom"
        if one.interval is not None:
            low, high = one.interval
            reach = max(high - value, value - low) / error.value
            text = f"{fmt.format_interval(metric, low, high)}, for all {one.family} together:"
            text += f" {reach:.3g} standard errors to each side"
            if 0.0 in one.interval:
                text += ", but cut at 0, as a later step of Holm's method finds a difference"
            yield f"{one.confidence:g}% interval = {text}"
    text = "" if value is None else f"{fmt.format_difference(metric, value)}: "
    yield f"verdict = {text}{one.verdict or 'none'}{one.meaning and f' ({one.meaning})'}"
