"""The record: how to reproduce the numbers, starting weights, and which trials have no numbers."""

from collections.abc import Mapping
from typing import Any

from kvlab.analysis.compute import Compute, measure_compute
from kvlab.analysis.effects import Effect
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.humanize import format_count, format_duration, format_number
from kvlab.report import document as doc
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.report.formatting import format_fixed, format_p_value
from kvlab.report.record_warnings import count_values, list_warnings

MAX_ERROR_LENGTH = 600
"""Characters of an error that are shown; the trial's directory has all of it."""


def report_provenance(study: Study) -> doc.Section:
    """List commands, versions, devices, data and the sweep's YAML."""
    own_sections = (study.sweep.get("report") or {}).get("sections")
    option = ""
    if study.sections is not None and list(study.sections) != own_sections:
        option = f" --sections {','.join(study.sections)}"
    command = str(study.sweep.get("command") or "kvlab submit")
    contents: list[doc.Content] = [
        texts.write("command", command=command),
        texts.write("same bytes", sweep=study.name, option=option),
    ]
    recorded = [row.record["provenance"] for row in study.rows if row.record.get("provenance")]
    if recorded:
        counts = count_values(recorded)
        rows = [
            ((("what", name), ("value", doc.Cell(value, value, code=True)), ("trials", count)), "")
            for name, values in counts.items()
            for value, count in sorted(values.items())
        ]
        n_trials = max(sum(values.values()) for values in counts.values())
        caption = f"What ran, over {format_count(n_trials, 'trial')}."
        total, parts = measure_compute(study)
        compiled = format_duration(total.compile_seconds)
        fields = {"total": total, "parts": parts, "spend": _format_spent, "compiled": compiled}
        contents += [*list_warnings(study), texts.write("compute", **fields)]
        contents.append(doc.make_table("provenance", caption, rows))
    for title, key in (("The sweep", "yaml"), ("The base experiment", "experiment_yaml")):
        if study.sweep.get(key):
            contents.append(doc.Block(title, str(study.sweep[key]), "yaml"))
    files: dict[tuple[str, str], list[str]] = {}  # of users, with the trials that have each text
    for row in study.done_rows:
        for file in (row.record["experiment"].get("extensions") or {}).items():
            files.setdefault(file, []).append(row.trial)
    for (name, text), trials in files.items():
        where = "" if len(trials) == len(study.done_rows) else f" of {', '.join(trials)}"
        contents.append(doc.Block(f"{name}{where}", text, "python"))
    return doc.Section("Provenance", tuple(contents), is_appendix=True)


def _format_spent(compute: Compute) -> str:
    hours = (f"{format_number(h)} {device} hours" for device, h in sorted(compute.hours.items()))
    return " and ".join([f"{format_number(compute.flops)} training FLOPs", *hours])


# Failures and retries


def report_failures(study: Study) -> doc.Section:
    """Report trials that failed, are missing or took several attempts."""
    failed = [row for row in study.rows if row.status in ("failed", "diverged", "damaged")]
    missing = [row for row in study.rows if row.status == "missing"]
    n_retried = 0
    for row in study.done_rows:
        record = row.record["provenance"]  # pauses at a rung of a search are no failures
        n_retried += int(record.get("attempts", 1)) - int(record.get("pauses", 0)) > 1
    cells = {row.levels for row in missing}
    fields = {"failed": failed, "missing": missing, "cells": cells, "n_retried": n_retried}
    contents: list[doc.Content] = [texts.write("failures", **fields)]
    if failed:
        rows = [(_failed_entries(study, r), study.cell_key(r.levels)) for r in failed]
        contents.append(doc.make_table("failures", "Trials without measurements.", rows))
    return doc.Section("Failures and retries", tuple(contents), is_appendix=True)


def _failed_entries(study: Study, row: TrialRow) -> doc.Entries:
    error = row.record.get("error") or {}
    kind, message = error.get("type") or "", error.get("message") or ""
    full_error = f"{kind}: {message}" if kind else str(message)
    shown_error = full_error
    if len(full_error) > MAX_ERROR_LENGTH:
        shown_error = full_error[:MAX_ERROR_LENGTH] + "\N{HORIZONTAL ELLIPSIS}"
    attempts = (row.record.get("provenance") or {}).get("attempts")
    trace = str(error.get("traceback") or "")
    yield "cell", study.label(row.levels)
    yield "seed", row.seed
    yield "trial", doc.Cell(row.trial, row.trial, code=True)
    yield "status", doc.cell(row.status, tone="bad")
    yield "class", str(error.get("class") or "")
    yield "error", doc.Cell(shown_error, full_error, code=bool(shown_error))
    yield "attempts", doc.EMPTY_CELL if attempts is None else attempts
    yield "traceback", doc.Cell(trace, trace, code=True) if trace else doc.EMPTY_CELL


# Divergence


def report_divergence(study: Study) -> doc.Section | None:
    """Report which levels' trainings diverged more often than those of their baseline levels."""
    effects = [e for e in study.effects(study.primary_metric) if e.divergence is not None]
    if not effects:
        return None
    diverged = {row.levels for row in study.rows if row.status == "diverged"}
    note = texts.write("divergence", study=study, cells=diverged)
    rows = ((_divergence_entries(study, one), study.change_key(one.change)) for one in effects)
    table = doc.make_table("divergence", "Diverged trials by level, paired.", rows)
    return doc.Section("Divergence", (note, table))


def _divergence_entries(study: Study, effect: Effect) -> doc.Entries:
    (factor, level), found = effect.change[0], effect.divergence
    assert found is not None, "only levels with diverged trainings are listed"
    yield "factor", factor
    yield "level", level
    yield "against", doc.cell(study.factors[factor][0], tone="muted")
    for title, hint, count in (
        ("pairs", "pairs whose trials both ended or diverged", found.pairs),
        ("level alone", "pairs in which only the trial with the level diverged", found.level),
        ("partner alone", "pairs in which only its partner diverged", found.partner),
        ("both", "pairs in which both diverged", found.both),
    ):
        yield title, doc.cell(format_fixed(count, 0), count), hint
    hint = texts.fill("p of divergence")
    yield doc.Column("p", True, hint), doc.cell(format_p_value(found.p), found.p)


# Starting weights (``training.init_from``)


def report_starting_weights(study: Study) -> doc.Section | None:
    """List the cells that do not start from randomly initialized weights."""
    starts: dict[Levels, Mapping[str, Any]] = {}
    for levels, by_seed in study.cells.items():
        row = next((row for row in by_seed.values() if row.is_done), None)
        if row is not None and (start := row.record["training_record"].get("start")):
            starts[levels] = start
    if not starts:
        return None

    has_changes = any(start.get("changed") for start in starts.values())

    def entries(levels: Levels) -> doc.Entries:
        start = starts[levels]
        yield "starts from", start["source"]
        for name in ("copied", "pooled", "averaged"):
            yield doc.Column(name, True), len(start[name])
        yield "own first values", len(start["fresh"])
        yield "left over", len(start["unused"]), "of the source"
        if has_changes:
            changed = "; ".join(f"{key} {both}" for key, both in start.get("changed", {}).items())
            hint = "of the model, which are not the source's"
            yield "other settings", changed or doc.EMPTY_CELL, hint

    caption = "Parameters by what became of them; the lowest seed of each cell."
    contents: list[doc.Content] = [texts.write("starting weights")]
    contents.append(cols.cells_table(study, "starts", caption, entries, starts))
    shown: set[tuple[str, ...]] = set()
    for levels, start in starts.items():
        own = (f"{name}: own first values, {reason}" for name, reason in start["fresh"].items())
        lines = (*own, *(f"{name}: of the source, left over" for name in start["unused"]))
        if lines and lines not in shown:
            shown.add(lines)
            count = format_count(len(lines), "parameter")
            title = f"{count} that did not fit, as in {study.label(levels)}"
            contents.append(doc.Block(title, "\n".join(lines)))
    return doc.Section("Starting weights", tuple(contents), is_appendix=True)
