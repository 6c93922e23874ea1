"""`kvlab explain`: what a trial, a cell or a level is computed from, and where its files are."""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from kvlab.analysis.explanation import Explanation, Term, explain_cell, explain_level
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.cli.progress_display import ID_DIGITS
from kvlab.cli.shared_arguments import add_json, add_store, open_store, sweep_name
from kvlab.cli.terminal import format_table
from kvlab.cli.trial_origin import TrialOrigins, format_facts
from kvlab.errors import RecordDamaged, UsageError
from kvlab.humanize import format_count, sanitize_line
from kvlab.report.formatting import (
    difference_unit,
    display_unit,
    format_difference,
    in_display_unit,
)
from kvlab.report.table_columns import mean_and_spread
from kvlab.store import Store
from kvlab.store.metrics import METRICS
from kvlab.store.record_forms import refuse_malformed

MAX_NAMES = 12
"""Names that a message lists."""

EPILOG = """\
TRIAL is an id or its first digits, and is tried first. CELL is a name as reports print it, or all
levels that are not the baseline's, such as heads=mqa,horizon=hybrid. FACTOR=LEVEL is what that
level does, over the settings of the other factors. Numbers are computed again from the values of
the trials. Of trials: files and whether they are what was written, text, code, machine, command,
time. Exit code 1: a file is damaged.

examples:
  kvlab explain 3f2a                      (a trial, by the first digits of its id)
  kvlab explain quickstart mqa+hybrid     (a cell of a sweep, by its name in the report)
  kvlab explain quickstart heads=mqa      (what a level does)
  kvlab explain mqa --store reports/quickstart/record.tar.xz
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
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "sweep", metavar="SWEEP", nargs="?", help="name or file of a sweep; default: all"
    )
    parser.add_argument(
        "what", metavar="TRIAL|CELL|FACTOR=LEVEL", help="a trial, a cell, or a level"
    )
    add_store(parser, archive=True)
    parser.add_argument(
        "--files",
        action="store_true",
        help="list the files of all trials with their sha256, as of a single one",
    )
    add_json(parser)


Answer = tuple[dict[str, Any], list[str], list[TrialRow]]
"""What a sweep says of a cell or a level: as JSON, as lines, and the trials behind it."""


def run(options: argparse.Namespace) -> int:
    store, text = open_store(options.store), options.what.strip()
    studies = _load_studies(store, options.sweep)
    trial = _find_trial(store, studies, text, in_sweep=options.sweep is not None)
    if trial is not None:
        return _explain_trial(options, store, studies, trial)
    if not studies:
        raise UsageError(f"{store.path} holds no sweep yet; name another store with --store")
    origins, facts = TrialOrigins(store), []
    for study in studies:
        with refuse_malformed(study.name):
            answer = _look_up(study, text)
        if answer is None:
            continue
        about, lines, rows = answer
        named = {r.trial: f"{study.label(r.levels)} seed={r.seed}" for r in rows if r.trial}
        trials = origins.read_all(named)
        facts.append({**about, "trials": [trial.as_dict() for trial in trials]})
        if not options.json:
            files = format_facts(trials, named, with_files=options.files) if trials else ()
            print("\n".join([*lines, "", *files]))
    if not facts:
        raise UsageError(sanitize_line(_describe_unknown(store, studies, text)))
    if options.json:
        print(json.dumps(facts, indent=1))
    return int(any(trial.is_damaged for trial in origins.seen))


def _load_studies(store: Store, sweep: str | None) -> list[Study]:
    """Read the sweep that is named, or all that are whole."""
    if sweep is not None:
        return [Study.load(store, sweep_name(sweep))]
    studies = []
    for name in store.sweep_names():
        try:
            studies.append(Study.load(store, name))
        except RecordDamaged as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return studies


def _find_trial(store: Store, studies: Sequence[Study], text: str, *, in_sweep: bool) -> str | None:
    """Return the trial whose id begins with a text; None if there is none.

    Raises:
        UsageError: Several do, and no cell or level has this name.
    """
    ids = {row.trial for study in studies for row in study.rows if row.trial}
    ids |= set() if in_sweep else set(store.trial_ids())
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
    is_level = len(words) == 1 and "=" in text  # what it does, which the baseline's does not
    return levels if levels in study.cells and words and not is_level else None


def _describe_unknown(store: Store, studies: Sequence[Study], text: str) -> str:
    """Say that nothing has a name, what there is, and what to write instead."""
    designs = [study for study in studies if study.search is None]
    for study in designs:
        factor, _, level = text.partition("=")
        if factor in study.factors and level == study.factors[factor][0]:
            others = ", ".join(f"{factor}={one}" for one in study.factors[factor][1:])
            rule = f"{text} is the baseline's level of {study.name}, which others are compared with"
            return f"{rule}; explain {others or 'the cell baseline'}"
    cells = list(dict.fromkeys(s.label(levels) for s in studies for levels in s.cells))
    changes = (f"{f}={one}" for s in designs for f, own in s.factors.items() for one in own[1:])
    levels = list(dict.fromkeys(changes))
    names = ", ".join(study.name for study in studies)
    where = f"{text} is no trial of {store.path}, and no cell or level of {names}"
    if near := get_close_matches(text, [*cells, *levels], 1):
        return f"{where}; did you mean {near[0]}?"
    if re.match(r"[-+\u2212<]?\d", text):
        where += "; numbers are not looked up: give the cell or the level of the number's row"
    for kind, listed in (("cells", cells), ("levels", levels)):
        more = ", ..." if len(listed) > MAX_NAMES else ""
        where += f"; {kind} are {', '.join(listed[:MAX_NAMES])}{more}" if listed else ""
    return where


# Trials


def _explain_trial(
    options: argparse.Namespace, store: Store, studies: Sequence[Study], trial: str
) -> int:
    """Print how a trial ended, what it is in each sweep, its files and what it recorded."""
    origin = TrialOrigins(store).read(trial)
    own = [(s, row) for s in studies for row in s.rows if row.trial == trial]
    measured = next((row.measurements for _, row in own if row.is_done), {})
    sharing = {row.trial for s in studies for row in s.rows if row.training == origin.training}
    folders = [
        store.trial_directory(trial),
        *(store.attempt_directory(trial, number) for number in store.attempts(trial)),
        *([store.training_directory(origin.training)] if origin.training else []),
    ]
    facts = {
        "kind": "trial",
        "cells": [{**_name_cell(s, row.levels), "seed": row.seed} for s, row in own],
        "cached": CACHED[origin.status],
        "same_weights": sorted(sharing - {trial}) if origin.training else [],
        "folders": [str(path) for path in folders if path.exists()],
        "measurements": {name: measured[name] for name in METRICS.sort(measured)},
        **origin.as_dict(),
    }
    if options.json:
        print(json.dumps([facts], indent=1))
        return int(origin.is_damaged)
    cells = [f"{s.name}: {s.label(row.levels)} seed={row.seed}" for s, row in own]
    print(f"trial {trial}: {origin.status}; {'; '.join(cells) or 'in no cell of these sweeps'}")
    lines = [line for s, row in own for line in _format_levels(s, row.levels)]
    lines.append(f"cached    {facts['cached']}")
    if shared := ", ".join(one[:ID_DIGITS] for one in facts["same_weights"]):
        lines.append(f"weights   those of {shared}, too")
    lines += [f"folder    {path}" for path in facts["folders"]]
    lines += format_facts([origin], {}, with_files=True)
    rows = [
        [name, f"{in_display_unit(name, value):.10g}", display_unit(name), METRICS[name].title]
        for name, value in facts["measurements"].items()
    ]
    table = [format_table([["recorded", "value", "unit", "what it is"], *rows], "lr")]
    print("\n".join([*lines, "", *table] if rows else lines))
    return int(origin.is_damaged)


def _name_cell(study: Study, levels: Levels) -> dict[str, Any]:
    named = dict(zip(study.factors, levels, strict=True))
    patches = study.sweep.get("patches", {})
    settings = {factor: patches.get(factor, {}).get(level, {}) for factor, level in named.items()}
    label = study.label(levels)
    return {"sweep": study.name, "cell": label, "levels": named, "settings": settings}


def _format_levels(study: Study, levels: Levels) -> Iterator[str]:
    """Yield the levels of a cell, and what each of them sets."""
    cell = _name_cell(study, levels)
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
    facts = {
        "kind": "cell",
        **_name_cell(study, levels),
        "metric": metric,
        "values": [
            {"seed": r.seed, "trial": r.trial, "status": r.status, "value": values.get(r.seed)}
            for r in rows
        ],
        "mean": mean,
        "standard_deviation": spread,
        "comparison": None if found is None else found.as_dict(),
    }
    trials = format_count(len(rows), "trial")
    lines = [f"cell {study.label(levels)} of sweep {study.name}: {trials}"]
    lines += [*_format_levels(study, levels), "", _name_metric(metric)]
    for row in rows:
        value = _show(metric, values[row.seed]) if row.seed in values else row.status
        lines.append(f"seed {row.seed}: {value}  ({row.trial[:ID_DIGITS]})")
    if mean is not None:
        deviation = "" if spread is None else f", standard deviation {_show(metric, spread)}"
        lines.append(f"mean of these = {_show(metric, mean)}{deviation}")
    if found is not None:
        compared = study.comparisons[levels]
        rows += [study.cells[compared.reference][seed] for seed in compared.seeds]
        return facts, [*lines, "", *_format_explanation(found)], rows
    if study.search is not None:
        why = "a search suggests its trials: none is compared with a reference"
    elif study.estimand.reference(levels) == levels:
        why = "it saves no byte: other cells are compared with it, and it is with none"
    else:
        why = "it has no seed in common with its reference, so nothing is compared"
    return facts, [*lines, "", why], rows


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
    return f"{METRICS[metric].title} ({', '.join(filter(None, (metric, display_unit(metric))))})"


def _show(metric: str, value: float, form: str = ".8g") -> str:
    return f"{in_display_unit(metric, value):{form}}"


def _format_explanation(one: Explanation) -> Iterator[str]:
    """Yield what is compared, the values, the sums, and what the report says of them."""
    metric = one.metric
    yield f"{one.title}, in {_name_metric(metric)}"
    yield from (f"  {note}" for note in one.notes)
    if one.settings:
        rows = [
            [
                use.cell, use.partner, f"{use.weight:.4g}" if use.weight else "",
                use.left_out if use.difference is None else _show(metric, use.difference, "+.8g"),
            ]
            for use in one.settings
        ]  # fmt: skip
        yield from ("", format_table([["setting", "minus", "weight", "difference"], *rows], "llr"))
    if one.computed is not None:
        yield from ("", _format_terms(one), "")
        sums = one.by_seed
        if len(one.terms) > 2 * len(sums):
            for seed, value in sums.items():
                yield f"seed {seed}: sum of weight x value = {_show(metric, value, '+.8g')}"
        unit = f" {difference_unit(metric)}".rstrip()
        count = format_count(len(sums), "seed")
        yield f"mean over {count} = {_show(metric, one.computed)}{unit}"
    yield from _format_judgement(one)


def _format_terms(one: Explanation) -> str:
    """Return the terms as a table: two by two where they are differences of pairs."""
    terms, metric = one.terms, one.metric
    pairs = list(zip(terms[::2], terms[1::2], strict=False))
    head = ["seed", "cell", "trial", "value", "weight"]
    rows, right = [[*_show_term(metric, term), f"{term.weight:+.4g}"] for term in terms], "rllrr"
    if all(a.seed == b.seed and abs(a.weight + b.weight) < 1e-12 for a, b in pairs):
        head = [*head[:4], "minus", "trial", "value", "difference", "weight"]
        right = "rllrllrrr"
        rows = [
            [
                *_show_term(metric, a), *_show_term(metric, b)[1:],
                _show(metric, a.value - b.value, "+.8g"), f"{a.weight:+.4g}",
            ]
            for a, b in pairs
        ]  # fmt: skip
    return format_table([head, *rows], right)


def _show_term(metric: str, term: Term) -> list[str]:
    return [str(term.seed), term.cell, term.trial[:ID_DIGITS], _show(metric, term.value)]


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
            text = f"{format_difference(metric, low)} to {format_difference(metric, high)}"
            text += f", for all {one.family} together: {reach:.3g} standard errors to each side"
            if 0.0 in one.interval:
                text += ", but cut at 0, as a later step of Holm's method finds a difference"
            yield f"{one.confidence:g}% interval = {text}"
    if value is not None and abs((one.computed or 0.0) - value) > 1e-8:
        yield f"the report has another difference: {_show(metric, value)}"
    text = "" if value is None else f"{format_difference(metric, value)}: "
    yield f"verdict = {text}{one.verdict or 'none'}{one.meaning and f' ({one.meaning})'}"
