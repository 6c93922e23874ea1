"""Validation loss during training."""

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report.document import Figure, Section, paragraph
from kvlab.report.figures.plot import SERIES, Axis, Line, Plot, Point
from kvlab.report.formatting import format_metric
from kvlab.report.pareto_front import memory_front

MAX_CURVES = len(SERIES)


def report_loss_curves(study: Study) -> Section | None:
    """Plot validation loss during training, of the baseline and the cells of most interest."""
    curves = _select_curves(study)
    if not curves:
        return None
    lines = tuple(
        Line(study.label(levels), curve, SERIES[number % MAX_CURVES], dashed=number % 2 == 1)
        for number, (levels, curve) in enumerate(curves.items())
    )
    final_losses = "; ".join(
        f"{line.name} ends at {format_metric('loss', line.points[-1].y)}" for line in lines
    )
    plot = Plot(Axis("training tokens (millions)"), Axis("validation loss (nats/token)"), lines)
    n_curved = sum(any(row.curve for row in by_seed.values()) for by_seed in study.cells.values())
    note = paragraph(
        "Mean over seeds of the one-shot validation loss during training, for the baseline, the"
        " cells that differ from it in one factor, and those on the front:"
        f" {format_count(len(curves), 'curve')} of {format_count(n_curved, 'cell')}. Cells that"
        f" share a training share a curve.{_token_note(study)}",
    )
    caption = "Validation loss against training tokens."
    return Section(
        "Loss curves", (note, Figure("curves", caption, f"{caption} {final_losses}.", plot))
    )


def _token_note(study: Study) -> str:
    """Note where losses during training and the final loss are over different tokens."""
    experiments = [
        (row.record["experiment"], row.measurements.get("loss_tokens")) for row in study.done_rows
    ]
    pairs = {
        (during, int(final))
        for experiment, final in experiments
        if (during := experiment.get("training", {}).get("evaluate_tokens")) and final
    }
    pairs_text = "; ".join(f"{during:,} and {final:,}" for during, final in sorted(pairs))
    if all(during == final for during, final in pairs):
        return ""
    return (
        " During training the loss is over another number of validation tokens than in the tables"
        f" ({pairs_text}), so a curve does not end at its cell's loss there."
    )


def _select_curves(study: Study) -> dict[Levels, tuple[Point, ...]]:
    """Select the cells to draw, each training once, and return their curves."""
    front = [point.levels for point in memory_front(study) if point.is_on_front]
    n_changed = study.n_changed_factors
    simple = sorted((c for c in study.cells if n_changed(c) <= 1), key=n_changed)
    curves: dict[Levels, tuple[Point, ...]] = {}
    drawn_trainings: set[str] = set()
    for levels in dict.fromkeys([*simple, *front]):
        trainings = {row.training for row in study.cells[levels].values() if row.curve}
        if not trainings or trainings & drawn_trainings or len(curves) == MAX_CURVES:
            continue
        drawn_trainings |= trainings
        curves[levels] = _mean_curve(study, levels)
    return curves


def _mean_curve(study: Study, levels: Levels) -> tuple[Point, ...]:
    """Return the mean over seeds, at the steps that all seeds have."""
    rows = [row for row in study.cells[levels].values() if row.curve]
    shared = set.intersection(*({step for step, _, _ in row.curve} for row in rows))
    tokens = {step: count for row in rows for step, count, _ in row.curve if step in shared}
    sums = dict.fromkeys(sorted(shared), 0.0)
    for row in rows:
        for step, _, loss in row.curve:
            if step in shared:
                sums[step] += loss
    label, key = study.label(levels), study.cell_key(levels)
    points = []
    for step, total in sums.items():
        loss = total / len(rows)
        position = f"step {step:,.0f}, {tokens[step]:,.0f} tokens"
        tip = (label, position, f"loss {format_metric('loss', loss)}")
        points.append(Point(tokens[step] / 10**6, loss, tip, key))
    return tuple(points)
