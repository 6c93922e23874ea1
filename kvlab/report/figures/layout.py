"""A plot laid out at a given width: a list of strokes, marks and texts in pixels.

Both renderers draw this list, so a figure is the same in every form. Text widths are estimated,
generously, since the reader's fonts are not known.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from kvlab.report.figures.plot import Line, Plot, Point, Points, Role, Shape
from kvlab.report.figures.scale import Scale, make_scale

FONT = 12.0
SMALL = 11.0
CHARACTER = 0.58
"""Mean width of a character, in font sizes."""

ROW = 26.0
"""Height of one row of an axis of names."""

Ink = Role | str


@dataclass(frozen=True)
class Stroke:
    """A line through pixels. ``role`` may also be ``grid``."""

    points: tuple[tuple[float, float], ...]
    role: Ink
    width: float = 1.0
    dashed: bool = False
    key: str = ""


@dataclass(frozen=True)
class Mark:
    """A symbol; radius 0 is invisible and only answers to hovering."""

    x: float
    y: float
    radius: float
    shape: Shape
    role: Role
    tip: tuple[str, ...] = ()
    key: str = ""


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    text: str
    anchor: str = "start"
    size: float = SMALL
    role: Ink = "ink"
    upright: bool = False
    key: str = ""


@dataclass
class Drawing:
    width: float
    height: float
    strokes: list[Stroke] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)


def lay_out_plot(plot: Plot, width: float) -> Drawing:
    """Places everything of a plot on ``width`` pixels; the height follows from the content."""
    legend = list(_legend_places(plot, width))
    top = 12 + (20 * (1 + legend[-1][2]) if legend else 0)
    left, right = _left_margin(plot, width), 14.0
    bottom = 62.0 if plot.x.kind == "bytes" else 48.0
    named = plot.y.kind == "names"
    inner = ROW * (len(plot.y.names) + 0.2) if named else min(380.0, max(230.0, 0.55 * width))
    drawing = Drawing(width, round(top + inner + bottom, 1))
    xs, ys = _extent(plot)
    x = make_scale(plot.x, xs, left, width - right)
    y_start, y_end = (top, top + inner) if named else (top + inner, top)
    y = make_scale(plot.y, ys, y_start, y_end)
    _draw_axes(drawing, plot, x, y, (left, top, width - right, top + inner))
    for layer in plot.layers:
        if isinstance(layer, Line):
            _draw_line(drawing, layer, x, y)
        else:
            _draw_points(drawing, layer, x, y)
    _draw_labels(drawing, plot, x, y, (left, top, width - right, top + inner))
    for place, layer, row in legend:
        _draw_legend(drawing, layer, place, 14 + 20 * row)
    return drawing


def text_width(text: str, size: float = SMALL) -> float:
    return CHARACTER * size * len(text)


def _extent(plot: Plot) -> tuple[list[float], list[float]]:
    points = [point for layer in plot.layers for point in layer.points]
    xs = [p.x for p in points] + [v for p in points for v in p.x_range or ()]
    ys = [p.y for p in points] + [v for p in points for v in p.y_range or ()]
    return ([*xs, 0.0] if plot.zero else xs), ys


def _left_margin(plot: Plot, width: float) -> float:
    if plot.y.kind != "names":
        return 66.0
    widest = max((text_width(name) for name in plot.y.names), default=0.0)
    return min(widest + 16, 0.42 * width)


def _draw_axes(
    drawing: Drawing, plot: Plot, x: Scale, y: Scale, box: tuple[float, float, float, float]
) -> None:
    left, top, right, bottom = box
    for tick in x.ticks:
        place = x(tick.value)
        drawing.strokes.append(Stroke(((place, top), (place, bottom)), "grid"))
        for number, line in enumerate(tick.lines):
            role: Role = "muted" if number else "ink"
            drawing.texts.append(Text(place, bottom + 16 + 14 * number, line, "middle", role=role))
    for tick in y.ticks:
        place = y(tick.value)
        drawing.strokes.append(Stroke(((left, place), (right, place)), "grid"))
        name = _cut(tick.lines[0], left - 12)
        drawing.texts.append(Text(left - 8, place + 4, name, "end"))
    drawing.strokes.append(Stroke(((left, bottom), (right, bottom)), "axis"))
    if plot.zero:
        drawing.strokes.append(Stroke(((x(0.0), top), (x(0.0), bottom)), "ink", 1.2))
    below = drawing.height - 6
    title = _cut(plot.x.title, right - left + 30, FONT)
    drawing.texts.append(Text((left + right) / 2, below, title, "middle", FONT))
    if plot.y.title:
        name = _cut(plot.y.title, bottom - top + 40, FONT)
        drawing.texts.append(Text(14, (top + bottom) / 2, name, "middle", FONT, upright=True))


def _cut(text: str, room: float, size: float = SMALL) -> str:
    fits = max(4, int(room / (CHARACTER * size)))
    return text if len(text) <= fits else text[: fits - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _draw_line(drawing: Drawing, line: Line, x: Scale, y: Scale) -> None:
    places = tuple((x(point.x), y(point.y)) for point in line.points)
    if len(places) > 1:
        key = line.points[0].key
        drawing.strokes.append(Stroke(places, line.role, 1.8, line.dashed, key))
    every = max(1, len(places) // 60)
    for number, ((left, top), point) in enumerate(zip(places, line.points, strict=True)):
        if point.tip and (number % every == 0 or number == len(places) - 1):
            radius = 2.5 if len(places) == 1 else 0
            drawing.marks.append(Mark(left, top, radius, "dot", line.role, point.tip, point.key))


def _draw_points(drawing: Drawing, layer: Points, x: Scale, y: Scale) -> None:
    for point in layer.points:
        left, top = x(point.x), y(point.y)
        for bar in _bars(point, x, y):
            drawing.strokes.append(Stroke(bar, layer.role, 1.4, key=point.key))
        mark = Mark(left, top, 4.5, layer.shape, layer.role, point.tip, point.key)
        drawing.marks.append(mark)


def _bars(point: Point, x: Scale, y: Scale) -> Iterator[tuple[tuple[float, float], ...]]:
    left, top = x(point.x), y(point.y)
    if point.x_range and point.x_range[0] != point.x_range[1]:
        low, high = map(x, point.x_range)
        yield (low, top), (high, top)
        yield (low, top - 4), (low, top + 4)
        yield (high, top - 4), (high, top + 4)
    if point.y_range and point.y_range[0] != point.y_range[1]:
        low, high = map(y, point.y_range)
        yield (left, low), (left, high)
        yield (left - 4, low), (left + 4, low)
        yield (left - 4, high), (left + 4, high)


Box = tuple[float, float, float, float]


def _draw_labels(drawing: Drawing, plot: Plot, x: Scale, y: Scale, frame: Box) -> None:
    """Each label beside its mark where it meets nothing else; else it is left to hovering."""
    taken = [(m.x - 5, m.y - 5, m.x + 5, m.y + 5) for m in drawing.marks if m.radius]
    taken += [box for s in drawing.strokes if s.role not in _BEHIND for box in _along(s)]
    for layer in plot.layers:
        for point in layer.points:
            if not point.label:
                continue
            half = text_width(point.label) / 2
            left, top = x(point.x), y(point.y)
            for dx, dy in _beside(half):
                middle, base = left + dx, top + dy
                box = (middle - half, base - 10, middle + half, base + 3)
                if _inside(box, frame) and not any(_meets(box, other) for other in taken):
                    taken.append(box)
                    text = Text(middle, base, point.label, "middle", key=point.key)
                    drawing.texts.append(text)
                    break


def _beside(half: float) -> Iterator[tuple[float, float]]:
    """Where a label may go, from its mark to its middle: near first, right before left."""
    for far in (0.0, 10.0, 22.0):
        yield half + 9 + far / 2, 4 - far
        yield half + 9 + far / 2, 4 + far
        yield -half - 9 - far / 2, 4 + far
        yield -half - 9 - far / 2, 4 - far
        yield 0.0, -9 - far
        yield 0.0, 18 + far


_BEHIND = frozenset({"grid", "axis"})


def _along(stroke: Stroke) -> Iterator[Box]:
    """Small boxes along a line, for keeping labels off it."""
    for (x1, y1), (x2, y2) in pairwise(stroke.points):
        steps = max(1, int(max(abs(x2 - x1), abs(y2 - y1)) / 8))
        for step in range(steps + 1):
            x, y = x1 + (x2 - x1) * step / steps, y1 + (y2 - y1) * step / steps
            yield x - 1, y - 1, x + 1, y + 1


def _inside(box: Box, frame: Box) -> bool:
    return box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _meets(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _legend_places(plot: Plot, width: float) -> Iterator[tuple[float, Points | Line, int]]:
    """Named layers from left to right, on as many rows as they need."""
    place, row = 8.0, 0
    named = [layer for layer in plot.layers if layer.name and layer.points]
    if len(named) < 2:
        return
    for layer in named:
        room = 26 + text_width(layer.name) + 14
        if place > 8.0 and place + room > width:
            place, row = 8.0, row + 1
        yield place, layer, row
        place += room


def _draw_legend(drawing: Drawing, layer: Points | Line, x: float, y: float) -> None:
    key = layer.points[0].key if isinstance(layer, Line) and layer.points else ""
    if isinstance(layer, Line):
        ends = ((x, y - 4), (x + 20, y - 4))
        drawing.strokes.append(Stroke(ends, layer.role, 2.0, layer.dashed, key))
    else:
        drawing.marks.append(Mark(x + 10, y - 4, 4.5, layer.shape, layer.role))
    name = _cut(layer.name, drawing.width - x - 26)
    drawing.texts.append(Text(x + 26, y, name, key=key))
