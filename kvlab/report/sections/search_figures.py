"""Pictures of a search: history of the best, front, parameters, and their importance."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvlab.analysis.search_results import Objective, SearchResults, SuggestedTrial
from kvlab.analysis.study import Study
from kvlab.humanize import format_count
from kvlab.report.document import Column, Content, Figure, Row, Section, Table, cell, paragraph
from kvlab.report.figures.plot import Axis, Line, Plot, Point, Points, Role
from kvlab.report.formatting import format_binary_size, format_percent
from kvlab.report.search_tables import (
    base_row,
    cell_key,
    format_objective,
    format_with_unit,
    in_objective_unit,
    objective_cell,
    objective_column,
    objective_of_row,
    objective_title,
    row_of,
    title_with_unit,
)
from kvlab.report.table_columns import size_cell, size_column
from kvlab.spec.search_config import format_setting, format_settings, short_keys

MAX_LABELS = 12
"""Marks that are named by the trial's number."""

MAX_LINES = 40
"""Trials that parallel coordinates draw, besides the best."""

MAX_BEST_LINES = 3


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
    figures = (_history_figure(study, search, n) for n in range(len(search.objectives)))
    return Section("History", (paragraph(text), *figures))


def _history_figure(study: Study, search: SearchResults, number: int) -> Figure:
    objective = search.objectives[number]
    beyond = [one for one in search.trials if one.is_measured and not one.is_eligible]
    improved = search.improvements(number)
    best = {one.number for one in improved}
    others = [one for one in search.eligible if one.number not in best]

    def marks(trials: list[SuggestedTrial], labelled: bool = False) -> tuple[Point, ...]:
        return tuple(
            _point(study, search, one, float(one.number), number, labelled) for one in trials
        )

    plot = Plot(
        Axis("suggestion"),
        Axis(title_with_unit(objective.name)),
        (
            Points("beyond a limit", marks(beyond), "muted", "ring"),
            Line("", _steps_of_best(search, number, improved), "c0"),
            Points("measured", marks(others), "c0", "ring"),
            Points("best so far", marks(improved, len(improved) <= MAX_LABELS), "c0", "dot"),
        ),
    )
    caption = f"{_capitalize(objective_title(objective.name))} of every measured trial, in order."
    ends = (improved[0], improved[-1])
    values = [format_with_unit(objective.name, one.values[number]) for one in ends]
    alt = f"{caption} The first is {values[0]}, the best {values[1]}, of trial {ends[1].number}."
    name, is_half = f"history-{objective.name.replace('_', '-')}", len(search.objectives) > 1
    return Figure(name, caption, alt, plot, is_half)


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _steps_of_best(
    search: SearchResults, number: int, improved: list[SuggestedTrial]
) -> tuple[Point, ...]:
    """Return the best so far as a step function up to the last suggestion."""
    name, corners = search.objectives[number].name, list[Point]()
    for one in improved:
        value = in_objective_unit(name, one.values[number])
        if corners:
            corners.append(Point(one.number, corners[-1].y))
        corners.append(Point(one.number, value))
    last = search.suggestions[-1].number
    return (*corners, Point(last, corners[-1].y))


def _point(
    study: Study,
    search: SearchResults,
    one: SuggestedTrial,
    x: float,
    number: int,
    labelled: bool = False,
) -> Point:
    name = search.objectives[number].name
    values = zip(search.objectives, one.values, strict=True)
    tip = (
        f"trial {one.number}",
        format_settings(one.settings),
        *(f"{objective_title(o.name)} {format_with_unit(o.name, v)}" for o, v in values),
    )
    y = in_objective_unit(name, one.values[number])
    return Point(x, y, tip, cell_key(study, one), str(one.number) if labelled else "")


# Front


def report_search_front(study: Study) -> Section | None:
    """Plot the objectives against each other; with one, against the bytes of the cache."""
    search = study.search
    assert search is not None, "only for searches"
    if not search.eligible:
        return None
    if len(search.objectives) > 1:
        pairs = [(0, other) for other in range(1, len(search.objectives))]
        figures: list[Content] = [_objectives_figure(study, search, *pair) for pair in pairs]
        count = format_count(len(search.best), "trial")
        text = f"The front has {count}: no other is as good in every objective and better in one."
        if len(pairs) > 1:
            text += " A figure shows two objectives, so some of its points are on the front for"
            text += " another objective."
        return Section("Front", (paragraph(text), *figures))
    figure_and_table = _memory_contents(study, search)
    return Section("Quality against memory", figure_and_table) if figure_and_table else None


def _objectives_figure(study: Study, search: SearchResults, y: int, x: int) -> Figure:
    names = [objective.name for objective in search.objectives]
    front = {one.number for one in search.best}
    others = [one for one in search.trials if one.is_measured and one.number not in front]

    def marks(trials: list[SuggestedTrial], labelled: bool) -> tuple[Point, ...]:
        return tuple(
            _point(study, search, one, in_objective_unit(names[x], one.values[x]), y, labelled)
            for one in trials
        )

    base = _base_point(study, names[y], names[x])
    plot = Plot(
        _cost_axis(names[x]),
        Axis(title_with_unit(names[y])),
        (
            Points("other trials", marks(others, False), "muted", "ring"),
            Points("on the front", marks(list(search.best), True), "c0", "dot"),
            Points("base experiment", base, "c1", "diamond"),
        ),
    )
    caption = f"{_capitalize(objective_title(names[y]))} against {objective_title(names[x])}."
    listed = "; ".join(
        f"trial {one.number}: {format_with_unit(names[x], one.values[x])},"
        f" {format_with_unit(names[y], one.values[y])}"
        for one in search.best[:MAX_LABELS]
    )
    stem = f"front-{names[y]}-{names[x]}".replace("_", "-")
    return Figure(stem, caption, f"{caption} On the front: {listed}.", plot)


def _cost_axis(name: str) -> Axis:
    kind = "bytes" if name.startswith("kv_bytes") else "linear"
    title = objective_title(name) if kind == "bytes" else title_with_unit(name)
    return Axis(title, "bytes" if kind == "bytes" else "linear")


def _base_point(study: Study, y_name: str, x_name: str) -> tuple[Point, ...]:
    base = base_row(study)
    values = [] if base is None else [objective_of_row(name, base) for name in (x_name, y_name)]
    if not values or None in values:
        return ()
    x, y = (in_objective_unit(n, v or 0.0) for n, v in zip((x_name, y_name), values, strict=True))
    tip = ("base experiment", format_with_unit(x_name, x), format_with_unit(y_name, y))
    return (Point(x, y, tip, study.cell_key(study.baseline), "base"),)


def _memory_contents(study: Study, search: SearchResults) -> tuple[Content, ...]:
    """Return the best trial of every size of the cache: a figure and a table."""
    objective = search.objectives[0]
    if objective.name.startswith("kv_bytes"):
        return ()
    sizes = {
        one.number: size
        for one in search.trials
        if one.is_measured
        and (row := row_of(study, one)) is not None
        and (size := objective_of_row("kv_bytes", row)) is not None
    }
    steps = _best_by_size(objective, [one for one in search.eligible if one.number in sizes], sizes)
    if len(set(sizes.values())) < 2 or not steps:
        return ()
    best = {one.number for one in steps}
    others = [one for one in search.trials if one.number in sizes and one.number not in best]

    def marks(trials: list[SuggestedTrial], labelled: bool) -> tuple[Point, ...]:
        return tuple(_point(study, search, one, sizes[one.number], 0, labelled) for one in trials)

    base = _base_point(study, objective.name, "kv_bytes")
    plot = Plot(
        Axis("KV bytes of one sequence at block size", "bytes"),
        Axis(title_with_unit(objective.name)),
        (
            Points("other trials", marks(others, False), "muted", "ring"),
            Points("best of its size or smaller", marks(steps, True), "c0", "dot"),
            Points("base experiment", base, "c1", "diamond"),
        ),
    )
    caption = f"{_capitalize(objective_title(objective.name))} against the size of the cache."
    listed = "; ".join(
        f"trial {one.number}: {format_binary_size(sizes[one.number])},"
        f" {format_with_unit(objective.name, one.values[0])}"
        for one in steps
    )
    text = (
        "Of the trials within the limits, these are the best at every size of the cache. Each is"
        " the best of what fits, so each is flattered by its selection."
    )
    table = Table(
        "best-by-memory",
        "The best trial within every size of the cache.",
        (
            size_column("cache at most"),
            Column("trial", True),
            objective_column(objective.name),
            Column("settings"),
        ),
        tuple(
            Row(
                (
                    size_cell(round(sizes[one.number])),
                    cell(str(one.number), one.number),
                    objective_cell(objective.name, one.values[0]),
                    cell(format_settings(one.settings)),
                ),
                cell_key(study, one),
            )
            for one in steps
        ),
    )
    figure = Figure("front-memory", caption, f"{caption} The best: {listed}.", plot)
    return (paragraph(text), figure, table)


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


# Parallel coordinates


def report_parallel_coordinates(study: Study) -> Section | None:
    """Plot every trial as a line through its settings and its objectives."""
    search = study.search
    assert search is not None, "only for searches"
    scales = [*_setting_scales(search), *_objective_scales(search)]
    if not search.eligible or len(scales) - len(search.objectives) < 1:
        return None
    ranked = search.best if len(search.objectives) > 1 else search.ranked(0)[:MAX_BEST_LINES]
    best = {one.number for one in ranked}
    measured = sorted(
        (one for one in search.trials if one.is_measured and one.number not in best),
        key=lambda one: search.objectives[0].loss(one.values[0]),
    )
    groups: tuple[tuple[str, list[SuggestedTrial], Role], ...] = (
        ("other trials", measured[:MAX_LINES], "muted"),
        (_name_best(search, len(ranked)), list(ranked[:MAX_LINES]), "c1"),
    )
    lines = tuple(
        Line(name if number == 0 else "", _crossings(study, one, scales), role)
        for name, trials, role in groups
        for number, one in enumerate(trials)
    )
    ticks = tuple(
        Point(column, position, (scale.title, text), label=text)
        for column, scale in enumerate(scales)
        for position, text in scale.ticks
    )
    plot = Plot(
        Axis("", "names", tuple(scale.title for scale in scales)),
        Axis("", "hidden"),
        (*lines, Points("", ticks, "ink", "dot")),
    )
    caption = "Every trial as a line through its settings and what was measured of it."
    note = f" Of the other trials the best {MAX_LINES} are drawn."
    note = note if len(measured) > MAX_LINES else ""
    listed = "; ".join(
        f"trial {one.number}: {format_settings(one.settings)}" for one in ranked[:MAX_BEST_LINES]
    )
    figure = Figure("parallel", f"{caption}{note}", f"{caption} The best: {listed}.", plot)
    return Section("Settings of the best", (figure,))


def _name_best(search: SearchResults, count: int) -> str:
    if len(search.objectives) > 1:
        return "the front"
    return "the best trial" if count == 1 else f"the best {count} trials"


@dataclass(frozen=True)
class _Scale:
    """One axis of parallel coordinates, from 0 at its foot to 1 at its top.

    Attributes:
        title: Its title.
        place: Returns where a trial crosses it; None if it does not.
        ticks: Labelled positions.
    """

    title: str
    place: Callable[[SuggestedTrial], float | None]
    ticks: tuple[tuple[float, str], ...]


def _setting_scales(search: SearchResults) -> Iterator[_Scale]:
    names = short_keys(search.keys)
    for key, choices in search.config["choices"].items():
        if len(choices) < 2:
            continue
        texts = [format_setting(value) for value in choices]
        places = {text: index / (len(texts) - 1) for index, text in enumerate(texts)}
        ticks = tuple((place, text) for text, place in places.items())
        yield _Scale(names[key], _place_choice(key, places), ticks)
    for key, interval in search.config["ranges"].items():
        low, high, is_log = interval["low"], interval["high"], interval["log"]
        middle = math.sqrt(low * high) if is_log else (low + high) / 2
        place = _place_number(low, high, is_log)
        labels = (format_setting(low), f"{middle:.2g}", format_setting(high))
        ticks = tuple(zip(map(place, (low, middle, high)), labels, strict=True))
        yield _Scale(names[key], _place_setting(key, place), ticks)


def _objective_scales(search: SearchResults) -> Iterator[_Scale]:
    for number, objective in enumerate(search.objectives):
        values = [one.values[number] for one in search.trials if one.is_measured]
        if not values:
            continue
        place = _place_number(min(values), max(values), is_log=False)
        ticks = tuple(
            (place(value), format_objective(objective.name, value))
            for value in sorted({min(values), max(values)})
        )
        yield _Scale(objective_title(objective.name), _place_value(number, place), ticks)


def _place_number(low: float, high: float, is_log: bool) -> Callable[[float], float]:
    def place(value: float) -> float:
        if high <= low:
            return 0.5
        if is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    return place


def _place_choice(
    key: str, places: Mapping[str, float]
) -> Callable[[SuggestedTrial], float | None]:
    return lambda one: places.get(format_setting(one.settings.get(key)))


def _place_setting(
    key: str, place: Callable[[float], float]
) -> Callable[[SuggestedTrial], float | None]:
    return lambda one: place(one.settings[key]) if key in one.settings else None


def _place_value(
    number: int, place: Callable[[float], float]
) -> Callable[[SuggestedTrial], float | None]:
    return lambda one: place(one.values[number])


def _crossings(study: Study, one: SuggestedTrial, scales: Sequence[_Scale]) -> tuple[Point, ...]:
    """Return where a trial's line crosses the axes; an axis that it has no value on is skipped."""
    tip, key = (f"trial {one.number}", format_settings(one.settings)), cell_key(study, one)
    places = ((column, scale.place(one)) for column, scale in enumerate(scales))
    return tuple(Point(column, place, tip, key) for column, place in places if place is not None)


# Importance


def report_importances(study: Study) -> Section | None:
    """Plot how much of the variation of every objective each parameter explains."""
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
    figures = []
    for objective, shares in search.importances.items():
        points = tuple(
            Point(100 * share, row, (names.get(key, key), format_percent(share)), label="")
            for row, (key, share) in enumerate(shares.items())
        )
        plot = Plot(
            Axis(f"share of the variation of {objective_title(objective)} (%)"),
            Axis("", "names", tuple(names.get(key, key) for key in shares)),
            (Points("", points, "c0", "dot"),),
        )
        caption = f"Importance of each parameter for {objective_title(objective)}."
        listed = "; ".join(f"{names.get(k, k)} {format_percent(v)}" for k, v in shares.items())
        stem = f"importance-{objective}".replace("_", "-")
        figures.append(Figure(stem, caption, f"{caption} {listed}.", plot))
    return Section("What mattered", (paragraph(text), *figures))
