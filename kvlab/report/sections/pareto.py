"""Memory against quality: the Pareto front, and the best cell in every budget."""

from kvlab.report.figures.plot import Axis, Line, Plot, Point, Points
from kvlab.report.numbers import (
    PLUS_MINUS,
    bytes_text,
    counted,
    difference,
    mebibytes,
    megabytes,
    short,
    shown,
    times,
    unit_of,
)
from kvlab.report.pareto import BudgetBest, CellPoint, budget_bests, points
from kvlab.report.section import (
    EMPTY,
    Bullets,
    Column,
    Content,
    Figure,
    Heading,
    Row,
    Section,
    Span,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.study import Study
from kvlab.trial.metrics import METRICS


def pareto(study: Study) -> Section | None:
    known = points(study)
    if not known:
        return None
    front = [point for point in known if point.front]
    title = METRICS[study.primary].title
    note = paragraph(
        f"A cell is on the front if no other cell stores as few bytes with a better {title};"
        f" {len(front)} of {counted(len(known), 'cell')} are. The front is drawn through means"
        " over seeds: neighbours whose difference is within noise could change places. Bars are"
        " standard deviations over seeds; they contain what all cells share at a seed, which"
        " paired differences do not.",
    )
    contents: list[Content] = [note, _figure(study, known), _table(study, front)]
    bests = list(budget_bests(study))
    if bests:
        contents += [Heading("At equal memory"), _budgets(study, bests)]
    return Section("Memory against quality", tuple(contents))


def _figure(study: Study, known: list[CellPoint]) -> Figure:
    metric = study.primary
    title = f"{short(metric)} ({unit_of(metric)})"
    front = [point for point in known if point.front]
    base = [point for point in known if point.levels == study.baseline]
    dominated = [p for p in known if not p.front and p.levels != study.baseline]
    plot = Plot(
        Axis("KV bytes of one sequence at block size", "bytes"),
        Axis(title),
        (
            Points("dominated", tuple(_point(study, p) for p in dominated), "muted", "ring"),
            Line("", tuple(Point(p.stored, p.mean) for p in front), "c0", dashed=True),
            Points("on the front", tuple(_point(study, p, True) for p in front), "c0", "dot"),
            Points("baseline", tuple(_point(study, p, True) for p in base), "c1", "diamond"),
        ),
    )
    listed = "; ".join(
        f"{study.label(point.levels)}: {bytes_text(point.stored)}, {shown(metric, point.mean)}"
        for point in front
    )
    caption = "Stored KV bytes against quality: means, with the standard deviation over seeds."
    return Figure("pareto", caption, f"{caption} The front: {listed}.", plot)


def _point(study: Study, point: CellPoint, named: bool = False) -> Point:
    metric = study.primary
    values = list(study.values(point.levels, metric).values())
    spread = 0.0
    if len(values) > 1:
        spread = (sum((v - point.mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    tip = (
        study.label(point.levels),
        bytes_text(point.stored),
        f"{shown(metric, point.mean)} {PLUS_MINUS} {shown(metric, spread)} {unit_of(metric)}"
        f" (n = {len(values)})",
        "on the front" if point.front else "dominated",
    )
    ends = (point.mean - spread, point.mean + spread) if named and spread else None
    label = study.label(point.levels) if named else ""
    return Point(point.stored, point.mean, tip, study.key(point.levels), label, y_range=ends)


def _table(study: Study, front: list[CellPoint]) -> Table:
    metric = study.primary
    base = study.kv_bytes(study.baseline)
    rows = []
    for point in front:
        found = study.paired(point.levels, study.baseline, metric)
        itself = point.levels == study.baseline or found is None
        rows.append(
            Row(
                (
                    cell(study.label(point.levels)),
                    cell(f"{point.stored:,}", point.stored),
                    cell(megabytes(point.stored), point.stored),
                    cell(mebibytes(point.stored), point.stored),
                    cell(times(base / point.stored), base / point.stored) if base else EMPTY,
                    cell(shown(metric, point.mean), point.mean),
                    EMPTY
                    if itself or found is None
                    else cell(difference(metric, found.value), found.value),
                ),
                study.key(point.levels),
            )
        )
    columns = (
        Column("cell"),
        Column("KV bytes", True),
        Column("MB", True),
        Column("MiB", True),
        Column("smaller", True),
        Column(f"{short(metric)} ({unit_of(metric)})", True),
        Column("against baseline", True),
    )
    return Table("pareto", "The cells on the front.", columns, tuple(rows))


def _budgets(study: Study, bests: list[BudgetBest]) -> Bullets:
    return Bullets(tuple(_budget(study, best) for best in bests))


def _budget(study: Study, best: BudgetBest) -> tuple[Span, ...]:
    metric, unit = study.primary, unit_of(study.primary)
    condition = best.condition[:1].upper() + best.condition[1:]
    spans: list[Span] = [
        f"{condition} the best of {counted(best.fitting, 'cell')} is ",
        Strong(study.label(best.point.levels)),
        f" at {shown(metric, best.point.mean)} {unit}, {bytes_text(best.point.stored)}",
    ]
    if best.second is None:
        return (*spans, ".")
    spans += ["; next is ", Strong(study.label(best.second.levels))]
    found = study.paired(best.second.levels, best.point.levels, metric)
    if found is None:
        return (*spans, ", at no shared seed.")
    spans.append(f", {difference(metric, found.value)}")
    if found.kind == "one seed":
        return (*spans, " (one seed: not tested).")
    if found.kind == "identical":
        return (*spans, " (identical).")
    low, high = difference(metric, found.low), difference(metric, found.high)
    told = "not told apart" if found.low <= 0 <= found.high else "told apart"
    many = ", before allowing for the best being picked from many" if best.fitting > 2 else ""
    return (*spans, f" (95% CI {low} to {high}: {told}{many}).")
