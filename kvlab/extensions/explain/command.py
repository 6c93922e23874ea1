"""`kvlab explain`: what a trial, a cell or a level is computed from, and where its files are."""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.cli.progress_display import ID_DIGITS
from kvlab.cli.shared_arguments import ALL_SWEEPS, add_record, open_store, sweep_name
from kvlab.cli.terminal import format_table, print_result
from kvlab.errors import RecordDamaged, StoreError, UsageError
from kvlab.extensions.explain import differences as diff
from kvlab.fs.sealed_files import read_seal, seal_file
from kvlab.humanize import sanitize_line, suggest_name
from kvlab.report import formatting as fmt
from kvlab.store import Store, record_forms
from kvlab.store.metrics import METRICS
from kvlab.store.result import flatten
from kvlab.store.verification import Verification

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


def _list_problems(origins: Iterable[diff.Facts]) -> dict[str, str]:
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


def _look_up(study: Study, text: str) -> diff.Answer | None:
    """Return what a sweep says of a level or a cell; None if it has neither of this name."""
    factor, _, level = text.partition("=")
    if study.search is None and level in study.factors.get(factor, ())[1:]:
        return diff.explain_level(study, factor, level)
    levels = _find_cell(study, text)
    return None if levels is None else diff.explain_cell(study, levels)


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
    """Say that nothing has a name, or no effect, and what to write instead."""
    for factor, own in (pair for study in studies for pair in study.factors.items()):
        if text == f"{factor}={own[0]}":
            others = ", ".join(f"{factor}={level}" for level in own[1:])
            return f"{text} is the baseline's level, which others are compared with; use {others}"
    names = [s.label(levels) for s in studies for levels in s.cells]
    for study in (one for one in studies if one.search is None):
        names += [f"{factor}={level}" for factor, own in study.factors.items() for level in own[1:]]
    names = list(dict.fromkeys(names))
    sweeps = ", ".join(study.name for study in studies)
    where = f"{text} is no trial of {store.path}, and no cell or level of {sweeps}"
    listed = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
    return f"{where}; {suggest_name(text, names, f'use {listed}')}"


# Trials


def _explain_trial(
    store: Store, studies: Sequence[Study], origin: diff.Facts
) -> tuple[diff.Facts, list[str]]:
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
        "cells": [{**diff.name_cell(s, row.levels), "seed": row.seed} for s, row in own],
        "cached": CACHED[origin["status"]],
        "same_weights": sorted(sharing - {trial}),
        "folders": [str(path) for path in folders if path.exists()],
        "measurements": {name: measured[name] for name in METRICS.sort(measured)},
        **origin,
    }
    cells = "; ".join(f"{s.name}: {s.label(row.levels)} seed={row.seed}" for s, row in own)
    lines = [f"trial {trial}: {origin['status']}; {cells or 'in no cell of these sweeps'}"]
    for cell in facts["cells"]:
        lines += diff.format_levels(cell)
    lines.append(f"cached    {facts['cached']}")
    if shared := ", ".join(one[:ID_DIGITS] for one in facts["same_weights"]):
        lines.append(f"weights   also those of {shared}")
    lines += [f"folder    {path}" for path in facts["folders"]]
    lines += _format_origin(origin)
    recorded = [
        [name, diff.format_value(name, value, ".10g"), fmt.display_unit(name), METRICS[name].title]
        for name, value in facts["measurements"].items()
    ]
    if recorded:
        lines += ["", format_table([["recorded", "value", "unit", "what it is"], *recorded], "lr")]
    return facts, lines


def _check_trial_files(store: Store, trial: str) -> tuple[list[dict[str, str]], list[str]]:
    """Check the files of a trial and of its training.

    Returns:
        The files, and notes on what is not as it was and is no damage. A file is its ``path``
        in the store, the ``sha256`` of its contents, or of sealed JSON the hash at its end, and
        what ``problem`` it has. One of the last two is empty.

    Raises:
        StoreError: a file cannot be read.
    """
    found, training = Verification(store), store.read_training_id(trial)
    found.check(store.trial_directory(trial))
    if training is not None:
        directory = store.training_directory(training)
        found.check(directory)
        if (directory / "training.json").exists() and not (directory / "final").exists():
            found.notes.append(f"the weights of training {training} were removed since")
    damaged = [{"path": one.path, "sha256": "", "problem": one.reason} for one in found.damaged]
    files = []
    for path in found.paths:
        try:
            sha256 = read_seal(path)
        except RecordDamaged:  # no JSON
            sha256 = seal_file(path)["sha256"]
        relative = path.relative_to(store.path).as_posix()
        files.append({"path": relative, "sha256": sha256, "problem": ""})
    return [*files, *damaged], found.notes


def _read_origin(store: Store, trial: str) -> diff.Facts:
    """Check the files of a trial, and read what its result says of its making."""
    files, notes = _check_trial_files(store, trial)
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


def _format_origin(one: diff.Facts) -> Iterator[str]:
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
