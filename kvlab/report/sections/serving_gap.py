"""The serving gap: what the serving cache changes that one-shot scoring cannot see."""

from dataclasses import replace

from kvlab.humanize import format_count
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Content,
    Heading,
    Row,
    Section,
    Span,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.formatting import PLUS_MINUS, format_difference, format_metric, format_significant
from kvlab.report.study import GAP_ROUNDING, Study
from kvlab.report.table_columns import mean_and_spread, mean_column, range_cell
from kvlab.report.trial_rows import Levels, TrialRow


def report_serving_gap(study: Study) -> Section | None:
    gaps = study.means("serving_gap")
    if not gaps:
        return None
    real = [levels for levels in gaps if abs(gaps[levels]) >= GAP_ROUNDING]
    text = (
        "Each trial's weights are scored twice on the same text: in one shot, and token by token"
        " through the very cache that would serve. The gap is the second loss minus the first, so"
        " it is paired by weights and needs no other trial. "
    )
    spans: list[Span] = [text]
    if real:
        worst = max(real, key=lambda levels: gaps[levels])
        spans.append(f"{format_count(len(real), 'cell')} of {len(gaps)} have one; the largest is ")
        spans += [
            Strong(study.label(worst)),
            f" at {format_difference('serving_gap', gaps[worst])}.",
        ]
    else:
        spans.append(
            f"No cell of {len(gaps)} has one beyond rounding ({GAP_ROUNDING:g} nats/token)."
        )
    contents: list[Content] = [paragraph(*spans), *_texts(study)]
    if real:
        contents.append(_table(study, real, len(gaps) - len(real)))
    contents += _storage(study)
    return Section("Serving gap", tuple(contents))


def _texts(study: Study) -> list[Content]:
    """A note where the two losses are not over the same text."""
    scored = {
        (row.measurements["loss_tokens"], row.measurements["served_tokens"])
        for row in study.done_rows
        if "loss_tokens" in row.measurements and "served_tokens" in row.measurements
    }
    if all(one_shot == served for one_shot, served in scored):
        return []
    listed = "; ".join(f"{one:,.0f} and {served:,.0f}" for one, served in sorted(scored))
    text = (
        f"The one-shot loss is over more text than the served loss ({listed} tokens), so the two"
        " columns do not subtract to the gap: that compares both on the served text alone."
    )
    return [paragraph(text)]


_ENDS = ("smallest gap (nats/token)", "largest gap (nats/token)")


def _table(study: Study, real: list[Levels], quiet: int) -> Table:
    columns = (
        Column("cell"),
        Column("n", True),
        mean_column("one-shot loss", "nats/token"),
        mean_column("served loss", "nats/token"),
        mean_column("gap (nats/token)"),
        Column("smallest and largest", True, "gap over seeds", _ENDS),
    )
    left_out = (
        f"; the other {format_count(quiet, 'cell')} have none beyond rounding" if quiet else ""
    )
    caption = f"Cells whose serving cache changes the loss{left_out}."
    return Table("serving-gap", caption, columns, tuple(_row(study, levels) for levels in real))


def _row(study: Study, levels: Levels) -> Row:
    values = list(study.values(levels, "serving_gap").values())
    mean, spread = mean_and_spread(values)
    text = format_difference("serving_gap", mean)
    text += f" {PLUS_MINUS} {format_metric('serving_gap', spread)}" if spread is not None else ""
    gap = Cell(text, mean, csv=(mean, spread))
    ends = min(values), max(values)
    extent = range_cell("serving_gap", *ends) if len(values) > 1 else EMPTY_CELL
    losses = (_mean(study, levels, "loss"), _mean(study, levels, "loss_served"))
    count = cell(str(len(values)), len(values))
    name = cell(study.label(levels))
    return Row((name, count, *losses, gap, extent), study.cell_key(levels))


def _storage(study: Study) -> list[Content]:
    """What keeping K and V in another dtype costs, where cells do."""
    coarse = list(study.means("kv_dtype_loss_change"))
    if not coarse:
        return []
    text = (
        "Where K and V are kept in another dtype than the model's, the same text is decoded once"
        " more, through a cache that differs in nothing but the dtype: what a tie costs is in"
        " neither column. The logit error is over every logit of that text."
    )
    columns = (
        Column("cell"),
        Column("kept as"),
        Column("logit error, rms (nats)", True),
        Column("largest", True, "logit error", ("logit error, largest (nats)",)),
        mean_column("loss change (nats/token)"),
    )
    rows = tuple(_storage_row(study, levels) for levels in coarse)
    caption = "Cells by the dtype of their cache, against the model's dtype; mean over seeds."
    return [
        Heading("The cache's dtype"),
        paragraph(text),
        Table("kv-dtype", caption, columns, rows),
    ]


def _storage_row(study: Study, levels: Levels) -> Row:
    kinds = {row.record["experiment"]["serving"]["kv_dtype"] for row in _rows(study, levels)}
    changes = list(study.values(levels, "kv_dtype_loss_change").values())
    numbers = mean_and_spread(changes)
    change = Cell(_small(changes), numbers[0], csv=numbers)
    errors = (_only_mean(study, levels, f"kv_dtype_logit_{name}") for name in ("rms", "largest"))
    name, kind = cell(study.label(levels)), cell(", ".join(sorted(kinds)))
    return Row((name, kind, *errors, change), study.cell_key(levels))


def _rows(study: Study, levels: Levels) -> list[TrialRow]:
    return [row for row in study.cells[levels].values() if row.is_done]


def _small(values: list[float]) -> str:
    """Mean and standard deviation, by significant digits: such changes are far below the four
    decimals that losses are shown with."""
    mean, spread = mean_and_spread(values)
    text = f"{'+' if mean > 0 else ''}{format_significant(mean, 2)}"
    return text if spread is None else f"{text} {PLUS_MINUS} {format_significant(spread, 2)}"


def _mean(study: Study, levels: Levels, metric: str) -> Cell:
    """Only the mean is shown; the CSV has its spread."""
    values = list(study.values(levels, metric).values())
    mean = _only_mean(study, levels, metric)
    return replace(mean, csv=mean_and_spread(values)) if values else mean


def _only_mean(study: Study, levels: Levels, metric: str) -> Cell:
    mean = study.mean(levels, metric)
    return EMPTY_CELL if mean is None else cell(format_metric(metric, mean), mean)
