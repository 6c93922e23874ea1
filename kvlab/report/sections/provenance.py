"""Provenance: how to reproduce the numbers, and which trials have none."""

from collections import Counter

from kvlab.analysis.compute import Compute, measure_compute
from kvlab.analysis.effects import Effect
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import TrialRow
from kvlab.humanize import format_count, format_number
from kvlab.report.document import (
    EMPTY_CELL,
    Block,
    Cell,
    Code,
    Column,
    Content,
    Paragraph,
    Row,
    Section,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.formatting import format_fixed, format_metric, format_p_value
from kvlab.report.record_warnings import count_values, list_warnings


def report_provenance(study: Study) -> Section:
    """List commands, versions, devices, data and the sweep's YAML."""
    contents: list[Content] = [
        paragraph("Computed by ", Code(str(study.sweep.get("command") or "kvlab submit")), "."),
        paragraph(
            "This report is a pure function of the record; the same record gives the same bytes."
            " Make it again with ",
            Code(f"kvlab report {study.name}{_sections_option(study)}"),
            ". ",
            Code(f"kvlab explain NUMBER --sweep {study.name}"),
            " follows a number of it to its trials, and computes it again.",
        ),
    ]
    recorded = [row.record["provenance"] for row in study.rows if row.record.get("provenance")]
    if recorded:
        counts = count_values(recorded)
        contents += list_warnings(study)
        contents += [_describe_compute(study), _table(counts)]
    for title, key in (("The sweep", "yaml"), ("The base experiment", "experiment_yaml")):
        if study.sweep.get(key):
            contents.append(Block(title, str(study.sweep[key]), "yaml"))
    return Section("Provenance", tuple(contents), is_appendix=True)


def _sections_option(study: Study) -> str:
    """Return the option that selects these sections, if they are not the sweep's own."""
    own_sections = (study.sweep.get("report") or {}).get("sections")
    if study.sections is None or list(study.sections) == own_sections:
        return ""
    return f" --sections {','.join(study.sections)}"


def _describe_compute(study: Study) -> Paragraph:
    """Say what the sweep has computed in all, and what of that is not recorded."""
    total, tuning = measure_compute(study)
    text = f" {format_number(total.flops)} training FLOPs in"
    text += f" {format_count(total.trainings, 'training')}, and {_format_hours(total)} with the"
    text += f" measurements of {format_count(total.trials, 'trial')}."
    if tuning is not None and tuning.trials:
        text += f" Of these, tuning took {format_number(tuning.flops)} FLOPs and"
        text += f" {_format_hours(tuning)} in {format_count(tuning.trials, 'trial')}."
    text += " A training counts once, whatever shares it."
    uncounted = []
    if total.without_flops:
        trials = format_count(total.without_flops, "trial")
        uncounted.append(f"the FLOPs of {trials} that failed or diverged")
    if total.without_hours:
        uncounted.append(f"the hours of {format_count(total.without_hours, 'pruned trial')}")
    if tuning is not None and (tuning.absent or not tuning.trials):
        count = format_count(tuning.absent, "trial") if tuning.absent else "all trials"
        uncounted.append(f"{count} of the tuning, whose results this record does not have")
    if uncounted:
        text += f" Not counted: {'; '.join(uncounted)}."
    return paragraph(Strong("Compute:"), text)


def _format_hours(compute: Compute) -> str:
    hours = (f"{format_number(h)} {device} hours" for device, h in sorted(compute.hours.items()))
    return " and ".join(hours)


def _table(counts: dict[str, Counter[str]]) -> Table:
    rows = [
        Row((cell(name), Cell(value, value, code=True), cell(f"{count:,}", count)))
        for name, values in counts.items()
        for value, count in sorted(values.items())
    ]
    columns = (Column("what"), Column("value"), Column("trials", True))
    caption = (
        f"What ran, over {format_count(max(sum(v.values()) for v in counts.values()), 'trial')}."
    )
    return Table("provenance", caption, columns, tuple(rows))


# Failures and retries


MAX_ERROR_LENGTH = 600
"""Characters of an error that are shown; the trial's directory has all of it."""


def report_failures(study: Study) -> Section:
    """Report trials that failed, were pruned, are missing or took several attempts."""
    failed = [row for row in study.rows if row.status in ("failed", "diverged", "damaged")]
    missing = [row for row in study.rows if row.status == "missing"]
    pruned = [row for row in study.rows if row.status == "pruned"]
    retried = [row for row in study.done_rows if _count_attempts(row) > 1]
    parts = []
    if not failed:
        parts.append("No trial failed.")
    if missing:
        cells = len({row.levels for row in missing})
        of_cells = format_count(cells, "cell")
        parts.append(f"{format_count(len(missing), 'trial')} of {of_cells} have not ended yet.")
    if retried:
        parts.append(f"{format_count(len(retried), 'measured trial')} took more than one attempt.")
    if failed:
        parts.append(
            f"{format_count(len(failed), 'trial')} ended without a result. A diverged training is a"
            " finding about its cell; any other failure says nothing about it. Pairs with these"
            " trials are left out of every comparison."
        )
    if pruned:
        parts.append(
            f"The search pruned {format_count(len(pruned), 'trial')}: their validation loss was"
            " behind that of others at the same fraction of the steps. They are left out of every"
            " comparison and of the front."
        )
    contents: list[Content] = [paragraph(" ".join(parts))]
    if failed:
        contents.append(_failed_table(study, failed))
    if pruned:
        contents.append(_pruned_table(study, pruned))
    return Section("Failures and retries", tuple(contents), is_appendix=True)


def report_divergence(study: Study) -> Section | None:
    """Report which levels' trainings diverged more often than those of their baseline levels."""
    effects = [e for e in study.effects(study.primary_metric) if e.divergence is not None]
    if not effects:
        return None
    diverged = {row.levels for row in study.rows if row.status == "diverged"}
    of_cells = format_count(len(diverged), "cell")
    text = (
        f"{format_count(study.status_counts['diverged'], 'trial')} of {of_cells} diverged. The"
        " remaining trials of such a cell are the lucky ones, so their mean is too good. A level"
        " that diverged where its partner at the same seed and settings did not is not called"
        " better or cheap, and its cells are not ranked. The effects leave out settings in which a"
        " training diverged, unless no others remain."
    )
    columns = (
        Column("factor"),
        Column("level"),
        Column("against"),
        Column("pairs", True, "pairs whose trials both ended or diverged"),
        Column("level alone", True, "pairs in which only the trial with the level diverged"),
        Column("partner alone", True, "pairs in which only its partner diverged"),
        Column("both", True, "pairs in which both diverged"),
        Column("p", True, _DIVERGENCE_P),
    )
    rows = tuple(_divergence_row(study, effect) for effect in effects)
    table = Table("divergence", "Diverged trials by level, paired.", columns, rows)
    return Section("Divergence", (paragraph(text), table))


_DIVERGENCE_P = (
    "that both sides diverge equally often; exact, by flipping the signs of the seeds' net counts,"
    " so with n seeds never below 2 to the power 1 - n"
)


def _divergence_row(study: Study, effect: Effect) -> Row:
    factor, level = effect.change[0]
    found = effect.divergence
    assert found is not None, "only levels with diverged trainings are listed"
    counts = (found.pairs, found.level, found.partner, found.both)
    numbers = (cell(format_fixed(count, 0), count) for count in counts)
    against = cell(study.factors[factor][0], tone="muted")
    p = cell(format_p_value(found.p), found.p)
    return Row((cell(factor), cell(level), against, *numbers, p), study.change_key(effect.change))


def _count_attempts(row: TrialRow) -> int:
    """Count a trial's attempts, without those that ended at a rung of a search as planned."""
    record = row.record["provenance"]
    return int(record.get("attempts", 1)) - int(record.get("pauses", 0))


def _pruned_table(study: Study, pruned: list[TrialRow]) -> Table:
    columns = (
        Column("cell"),
        Column("seed", True),
        Column("trial"),
        Column("steps", True),
        Column("of", True),
        Column("validation loss there (nats/token)", True),
    )
    rows = []
    for row in pruned:
        record = row.record["pruned"]
        entries = (
            cell(study.label(row.levels)),
            cell(str(row.seed), row.seed),
            Cell(row.trial, row.trial, code=True),
            cell(f"{record['step']:,}", record["step"]),
            cell(f"{record['steps']:,}", record["steps"]),
            cell(format_metric("loss", record["loss"]), record["loss"]),
        )
        rows.append(Row(entries, study.cell_key(row.levels), "muted"))
    return Table("pruned", "Trials that the search pruned.", columns, tuple(rows))


def _failed_table(study: Study, failed: list[TrialRow]) -> Table:
    columns = (
        Column("cell"),
        Column("seed", True),
        Column("trial"),
        Column("status"),
        Column("class"),
        Column("error"),
        Column("attempts", True),
        Column("traceback"),
    )
    rows = tuple(_row(study, row) for row in failed)
    return Table("failures", "Trials without measurements.", columns, rows)


def _row(study: Study, row: TrialRow) -> Row:
    error = row.record.get("error") or {}
    kind, message = error.get("type") or "", error.get("message") or ""
    full_error = f"{kind}: {message}" if kind else str(message)
    shown_error = full_error
    if len(full_error) > MAX_ERROR_LENGTH:
        shown_error = full_error[:MAX_ERROR_LENGTH] + "\N{HORIZONTAL ELLIPSIS}"
    attempts = (row.record.get("provenance") or {}).get("attempts")
    traceback = error.get("traceback")
    return Row(
        (
            cell(study.label(row.levels)),
            cell(str(row.seed), row.seed),
            Cell(row.trial, row.trial, code=True),
            cell(row.status, tone="bad"),
            cell(str(error.get("class") or "")),
            Cell(shown_error, full_error, code=bool(shown_error)),
            EMPTY_CELL if attempts is None else cell(str(attempts), attempts),
            Cell(str(traceback), str(traceback), code=True) if traceback else EMPTY_CELL,
        ),
        study.cell_key(row.levels),
    )
