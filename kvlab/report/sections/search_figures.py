"""What a search found as pictures: the best so far, and the front; shares of what mattered."""

from collections.abc import Mapping, Sequence

from kvlab.analysis.search_results import SearchResults, SuggestedTrial
from kvlab.analysis.study import Study
from kvlab.humanize import format_count
from kvlab.report import document as doc
from kvlab.report import search_tables as tables
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.report.formatting import format_percent
from kvlab.spec.search_config import format_settings, short_keys

MAX_LABELS = 12
"""Marks that are named by the trial's number."""


def report_search_history(study: Study, search: SearchResults) -> doc.Section | None:
    """Plot every measured trial and the best so far, one figure an objective."""
    if not search.eligible:
        return None
    last = search.improvements(0)[-1].number
    text = "The line is the best so far of the trials within the limits."
    if len(search.objectives) == 1:
        moves = "falls" if search.objectives[0].is_minimized else "rises"
        text += f" The last improvement was trial {last} of {len(search.suggestions):,}"
        text += f" suggestions; where the line still {moves}, more trials may find better."
    numbers = range(len(search.objectives))
    figures = (_history_figure(study, search, number) for number in numbers)
    return doc.Section("History", (doc.paragraph(text), *figures))


def _history_figure(study: Study, search: SearchResults, number: int) -> doc.Figure:
    name, improved = search.objectives[number].name, search.improvements(number)
    others = [one for one in search.eligible if one not in improved]
    beyond = [one for one in search.trials if one.is_measured and not one.is_eligible]

    def marks(trials: Sequence[SuggestedTrial], is_labelled: bool = False) -> tuple[doc.Point, ...]:
        return tuple(_mark(study, search, t, t.number, number, is_labelled) for t in trials)

    steps = doc.draw_steps(
        (one.number, tables.in_objective_unit(name, one.values[number])) for one in improved
    )
    steps += (doc.Point(search.suggestions[-1].number, steps[-1].y),)
    plot = doc.Plot(
        doc.Axis("suggestion"),
        doc.Axis(tables.title_with_unit(name)),
        (
            doc.Points("beyond a limit", marks(beyond), "muted", "ring"),
            doc.Line("", steps, "c0"),
            doc.Points("measured", marks(others), "c0", "ring"),
            doc.Points("best so far", marks(improved, len(improved) <= MAX_LABELS), "c0", "dot"),
        ),
    )
    caption = f"{_title(name)} of every measured trial, in order."
    first, last = (tables.format_with_unit(name, improved[end].values[number]) for end in (0, -1))
    alt = f"{caption} The first is {first}, the best {last}, of trial {improved[-1].number}."
    stem = f"history-{name.replace('_', '-')}"
    return doc.Figure(stem, caption, alt, plot, len(search.objectives) > 1)


def _title(name: str) -> str:
    title = tables.objective_title(name)
    return title[:1].upper() + title[1:]


def _mark(
    study: Study,
    search: SearchResults,
    one: SuggestedTrial,
    x: float,
    number: int,
    is_labelled: bool,
) -> doc.Point:
    """Return a trial's mark at an x, with its objective of this number as y."""
    values = (
        f"{tables.objective_title(o.name)} {tables.format_with_unit(o.name, value)}"
        for o, value in zip(search.objectives, one.values, strict=True)
    )
    tip = (f"trial {one.number}", format_settings(one.settings), *values)
    y = tables.in_objective_unit(search.objectives[number].name, one.values[number])
    label = str(one.number) if is_labelled else ""
    return doc.Point(x, y, tip, tables.cell_key(study, one), label)


def report_search_front(study: Study, search: SearchResults) -> doc.Section | None:
    """Plot the objectives against each other; with one, against the bytes of the cache."""
    if not search.eligible:
        return None
    if len(search.objectives) == 1:
        return _report_memory(study, search)
    text = f"The front has {format_count(len(search.best), 'trial')}: no other is as good in every"
    text += " objective and better in one."
    if len(search.objectives) > 2:
        text += " A figure shows two objectives, so some of its points are on the front for"
        text += " another objective."
    contents: list[doc.Content] = [doc.paragraph(text)]
    y_name = search.objectives[0].name
    for number, objective in enumerate(search.objectives[1:], start=1):
        costs = {one.number: one.values[number] for one in search.trials if one.is_measured}
        stem = f"front-{y_name}-{objective.name}".replace("_", "-")
        best = "on the front", search.best
        contents.append(_front_figure(study, search, stem, objective.name, costs, *best))
    return doc.Section("Front", tuple(contents))


def _front_figure(
    study: Study,
    search: SearchResults,
    stem: str,
    x_name: str,
    costs: Mapping[int, float],
    best_title: str,
    best: Sequence[SuggestedTrial],
) -> doc.Figure:
    """Plot the first objective against a cost.

    Args:
        study: The study.
        search: Its search.
        stem: Of the figure's files.
        x_name: Name of the cost, an objective or what could be one.
        costs: Number of a measured trial -> its cost; without those that have none.
        best_title: What ``best`` are.
        best: Trials that are marked.
    """
    y_name = search.objectives[0].name
    others = [one for one in search.trials if one.number in costs and one not in best]

    def marks(trials: Sequence[SuggestedTrial], is_labelled: bool) -> tuple[doc.Point, ...]:
        places = ((one, tables.in_objective_unit(x_name, costs[one.number])) for one in trials)
        return tuple(_mark(study, search, one, x, 0, is_labelled) for one, x in places)

    base, base_marks = tables.base_row(study), list[doc.Point]()
    if base is not None:
        x, y = (tables.objective_of_row(name, base) for name in (x_name, y_name))
        if x is not None and y is not None:
            named = ((x_name, x), (y_name, y))
            tip = ("base experiment", *(tables.format_with_unit(*one) for one in named))
            x, y = (tables.in_objective_unit(*one) for one in named)
            base_marks.append(doc.Point(x, y, tip, study.cell_key(study.baseline), "base"))
    is_bytes = x_name.startswith("kv_bytes")
    x_title = tables.objective_title(x_name) if is_bytes else tables.title_with_unit(x_name)
    plot = doc.Plot(
        doc.Axis(x_title, "bytes" if is_bytes else "linear"),
        doc.Axis(tables.title_with_unit(y_name)),
        (
            doc.Points("other trials", marks(others, False), "muted", "ring"),
            doc.Points(best_title, marks(best, True), "c0", "dot"),
            doc.Points("base experiment", tuple(base_marks), "c1", "diamond"),
        ),
    )
    caption = f"{_title(y_name)} against {tables.objective_title(x_name)}."
    listed = "; ".join(
        f"trial {one.number}: {tables.format_with_unit(x_name, costs[one.number])},"
        f" {tables.format_with_unit(y_name, one.values[0])}"
        for one in best[:MAX_LABELS]
    )
    return doc.Figure(stem, caption, f"{caption} {best_title.capitalize()}: {listed}.", plot)


def _report_memory(study: Study, search: SearchResults) -> doc.Section | None:
    """Report the best trial of every size of the cache: a figure and a table."""
    objective = search.objectives[0]
    sizes: dict[int, float] = {}
    for one in search.trials:
        row = tables.row_of(study, one)
        size = None if row is None else tables.objective_of_row("kv_bytes", row)
        if one.is_measured and size is not None:
            sizes[one.number] = size
    best, least = [], float("inf")  # better than every one with a cache of at most their size
    fitting = [one for one in search.eligible if one.number in sizes]
    for one in sorted(fitting, key=lambda t: (sizes[t.number], objective.loss(t.values[0]))):
        if objective.loss(one.values[0]) < least:
            least = objective.loss(one.values[0])
            best.append(one)
    if objective.name.startswith("kv_bytes") or len(set(sizes.values())) < 2 or not best:
        return None
    text = texts.fill("best by memory")
    title = "best of its size or smaller"
    figure = _front_figure(study, search, "front-memory", "kv_bytes", sizes, title, best)

    def entries(one: SuggestedTrial) -> doc.Entries:
        yield cols.size_column("cache at most"), cols.size_cell(round(sizes[one.number]))
        yield "trial", one.number
        yield tables.objective_entry(objective.name, one.values[0])
        yield "settings", doc.cell(format_settings(one.settings))

    rows = (doc.KeyedRow(entries(one), tables.cell_key(study, one)) for one in best)
    table = doc.make_table("best-by-memory", "The best trial within every size of the cache.", rows)
    return doc.Section("Quality against memory", (doc.paragraph(text), figure, table))


def report_importances(_study: Study, search: SearchResults) -> doc.Section | None:
    """Report how much of the variation of every objective each parameter explains."""
    if not search.importances:
        return None
    n_measured = sum(one.is_measured for one in search.trials)
    text = texts.fill("importances", trials=format_count(n_measured, "trial"))
    names = short_keys(search.keys)

    def entries(key: str) -> doc.Entries:
        yield "setting", doc.cell(names.get(key, key))
        for objective, shares in search.importances.items():
            column = doc.Column(tables.objective_title(objective), True)
            yield column, cols.number_cell(shares.get(key), format_percent)

    keys = dict.fromkeys(key for shares in search.importances.values() for key in shares)
    caption = "Share of the variation of each objective that a setting explains."
    table = doc.make_table("importances", caption, (doc.KeyedRow(entries(key)) for key in keys))
    return doc.Section("What mattered", (doc.paragraph(text), table))
