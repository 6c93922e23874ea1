"""What a search found as pictures: the best so far, and the front; shares of what mattered."""

from collections.abc import Mapping, Sequence

from kvlab.analysis.search_results import Objective, SuggestedTrial
from kvlab.analysis.study import Study
from kvlab.humanize import format_count
from kvlab.report import search_tables as tables
from kvlab.report.document import (
    EMPTY_CELL,
    Column,
    Content,
    Figure,
    Row,
    Section,
    Table,
    cell,
    paragraph,
)
from kvlab.report.figures.plot import Axis, Line, Plot, Point, Points
from kvlab.report.formatting import format_percent
from kvlab.report.table_columns import size_cell, size_column
from kvlab.spec.search_config import format_settings, short_keys

MAX_LABELS = 12
"""Marks that are named by the trial's number."""


def report_search_history(study: Study) -> Section | None:
    """Plot every measured trial and the best so far, one figure an objective."""
    search = study.search
    assert search is not None, "only for searches"
    if not search.eligible:
        return None
    last = search.improvements(0)[-1].number
    text = "The line is the best so far of the trials within the limits."
    if len(search.objectives) == 1:
        text += f" The last improvement was trial {last} of {len(search.suggestions):,}"
        text += " suggestions; where the line still falls, more trials may find better."
        if not search.objectives[0].is_minimized:
            text = text.replace("falls", "rises")
    figures = (_history_figure(study, number) for number in range(len(search.objectives)))
    return Section("History", (paragraph(text), *figures))


def _history_figure(study: Study, number: int) -> Figure:
    search = study.search
    assert search is not None
    name, improved = search.objectives[number].name, search.improvements(number)
    best = {one.number for one in improved}
    others = [one for one in search.eligible if one.number not in best]
    beyond = [one for one in search.trials if one.is_measured and not one.is_eligible]

    def marks(trials: list[SuggestedTrial], is_labelled: bool = False) -> tuple[Point, ...]:
        places = ((one, float(one.number)) for one in trials)
        return tuple(_mark(study, one, x, number, is_labelled) for one, x in places)

    steps: list[Point] = []
    for one in improved:
        y = tables.in_objective_unit(name, one.values[number])
        steps += [Point(one.number, steps[-1].y)] if steps else []
        steps.append(Point(one.number, y))
    steps.append(Point(search.suggestions[-1].number, steps[-1].y))
    plot = Plot(
        Axis("suggestion"),
        Axis(tables.title_with_unit(name)),
        (
            Points("beyond a limit", marks(beyond), "muted", "ring"),
            Line("", tuple(steps), "c0"),
            Points("measured", marks(others), "c0", "ring"),
            Points("best so far", marks(improved, len(improved) <= MAX_LABELS), "c0", "dot"),
        ),
    )
    caption = f"{_title(name)} of every measured trial, in order."
    first, last = (
        tables.format_with_unit(name, one.values[number]) for one in (improved[0], improved[-1])
    )
    alt = f"{caption} The first is {first}, the best {last}, of trial {improved[-1].number}."
    stem = f"history-{name.replace('_', '-')}"
    return Figure(stem, caption, alt, plot, len(search.objectives) > 1)


def _title(name: str) -> str:
    title = tables.objective_title(name)
    return title[:1].upper() + title[1:]


def _mark(study: Study, one: SuggestedTrial, x: float, number: int, is_labelled: bool) -> Point:
    """Return a trial's mark at an x, with its objective of this number as y."""
    search = study.search
    assert search is not None
    tip = (
        f"trial {one.number}",
        format_settings(one.settings),
        *(
            f"{tables.objective_title(o.name)} {tables.format_with_unit(o.name, value)}"
            for o, value in zip(search.objectives, one.values, strict=True)
        ),
    )
    y = tables.in_objective_unit(search.objectives[number].name, one.values[number])
    label = str(one.number) if is_labelled else ""
    return Point(x, y, tip, tables.cell_key(study, one), label)


def report_search_front(study: Study) -> Section | None:
    """Plot the objectives against each other; with one, against the bytes of the cache."""
    search = study.search
    assert search is not None, "only for searches"
    if not search.eligible:
        return None
    if len(search.objectives) == 1:
        return _report_memory(study)
    text = f"The front has {format_count(len(search.best), 'trial')}: no other is as good in every"
    text += " objective and better in one."
    if len(search.objectives) > 2:
        text += " A figure shows two objectives, so some of its points are on the front for"
        text += " another objective."
    contents: list[Content] = [paragraph(text)]
    y_name = search.objectives[0].name
    for number, objective in enumerate(search.objectives[1:], start=1):
        costs = {one.number: one.values[number] for one in search.trials if one.is_measured}
        stem = f"front-{y_name}-{objective.name}".replace("_", "-")
        best = "on the front", search.best
        contents.append(_front_figure(study, stem, objective.name, costs, *best))
    return Section("Front", tuple(contents))


def _front_figure(
    study: Study,
    stem: str,
    x_name: str,
    costs: Mapping[int, float],
    best_title: str,
    best: Sequence[SuggestedTrial],
) -> Figure:
    """Plot the first objective against a cost.

    Args:
        x_name: Name of the cost, an objective or what could be one.
        costs: Number of a measured trial -> its cost; without those that have none.
        best_title: What ``best`` are, which are marked.
    """
    search = study.search
    assert search is not None
    y_name, best_numbers = search.objectives[0].name, {one.number for one in best}
    others = [one for one in search.trials if one.number in costs.keys() - best_numbers]

    def marks(trials: Sequence[SuggestedTrial], is_labelled: bool) -> tuple[Point, ...]:
        places = ((one, tables.in_objective_unit(x_name, costs[one.number])) for one in trials)
        return tuple(_mark(study, one, x, 0, is_labelled) for one, x in places)

    is_bytes = x_name.startswith("kv_bytes")
    x_title = tables.objective_title(x_name) if is_bytes else tables.title_with_unit(x_name)
    plot = Plot(
        Axis(x_title, "bytes" if is_bytes else "linear"),
        Axis(tables.title_with_unit(y_name)),
        (
            Points("other trials", marks(others, False), "muted", "ring"),
            Points(best_title, marks(best, True), "c0", "dot"),
            Points("base experiment", _base_point(study, y_name, x_name), "c1", "diamond"),
        ),
    )
    caption = f"{_title(y_name)} against {tables.objective_title(x_name)}."
    listed = "; ".join(
        f"trial {one.number}: {tables.format_with_unit(x_name, costs[one.number])},"
        f" {tables.format_with_unit(y_name, one.values[0])}"
        for one in best[:MAX_LABELS]
    )
    return Figure(stem, caption, f"{caption} {best_title.capitalize()}: {listed}.", plot)


def _base_point(study: Study, y_name: str, x_name: str) -> tuple[Point, ...]:
    base = tables.base_row(study)
    if base is None:
        return ()
    x, y = (tables.objective_of_row(name, base) for name in (x_name, y_name))
    if x is None or y is None:
        return ()
    named = ((x_name, x), (y_name, y))
    tip = ("base experiment", *(tables.format_with_unit(*one) for one in named))
    x, y = (tables.in_objective_unit(*one) for one in named)
    return (Point(x, y, tip, study.cell_key(study.baseline), "base"),)


def _report_memory(study: Study) -> Section | None:
    """Report the best trial of every size of the cache: a figure and a table."""
    search = study.search
    assert search is not None
    objective = search.objectives[0]
    sizes = {
        one.number: size
        for one in search.trials
        if one.is_measured
        and (row := tables.row_of(study, one)) is not None
        and (size := tables.objective_of_row("kv_bytes", row)) is not None
    }
    best = _best_by_size(objective, [one for one in search.eligible if one.number in sizes], sizes)
    if objective.name.startswith("kv_bytes") or len(set(sizes.values())) < 2 or not best:
        return None
    text = (
        "Of the trials within the limits, these are the best at every size of the cache. Each is"
        " the best of what fits, so each is flattered by its selection."
    )
    best_title = "best of its size or smaller"
    figure = _front_figure(study, "front-memory", "kv_bytes", sizes, best_title, best)
    columns = (
        size_column("cache at most"),
        Column("trial", True),
        tables.objective_column(objective.name),
        Column("settings"),
    )
    rows = []
    for one in best:
        cells = (
            size_cell(round(sizes[one.number])),
            cell(str(one.number), one.number),
            tables.objective_cell(objective.name, one.values[0]),
            cell(format_settings(one.settings)),
        )
        rows.append(Row(cells, tables.cell_key(study, one)))
    caption = "The best trial within every size of the cache."
    table = Table("best-by-memory", caption, columns, tuple(rows))
    return Section("Quality against memory", (paragraph(text), figure, table))


def _best_by_size(
    objective: Objective, trials: list[SuggestedTrial], sizes: dict[int, float]
) -> list[SuggestedTrial]:
    """Return the trials that are better than every one with a cache of at most their size."""
    found, least = [], float("inf")
    for one in sorted(trials, key=lambda t: (sizes[t.number], objective.loss(t.values[0]))):
        if objective.loss(one.values[0]) < least:
            least = objective.loss(one.values[0])
            found.append(one)
    return found


def report_importances(study: Study) -> Section | None:
    """Report how much of the variation of every objective each parameter explains."""
    search = study.search
    assert search is not None, "only for searches"
    if not search.importances:
        return None
    measured = sum(one.is_measured for one in search.trials)
    text = (
        "Share of the variation of the objective that each parameter explains over the space, by"
        f" fANOVA (Hutter et al. 2014; a random forest fitted to {format_count(measured, 'trial')},"
        " by Optuna). It ranks parameters, tests nothing, and says nothing about the direction. A"
        " sampler that looked mostly at good regions has seen little of the others."
    )
    names = short_keys(search.keys)
    columns = [
        Column("setting"),
        *(Column(tables.objective_title(name), True) for name in search.importances),
    ]
    rows = []
    for key in dict.fromkeys(key for shares in search.importances.values() for key in shares):
        shares = [found.get(key) for found in search.importances.values()]
        cells = (EMPTY_CELL if s is None else cell(format_percent(s), s) for s in shares)
        rows.append(Row((cell(names.get(key, key)), *cells)))
    caption = "Share of the variation of each objective that a setting explains."
    table = Table("importances", caption, tuple(columns), tuple(rows))
    return Section("What mattered", (paragraph(text), table))
