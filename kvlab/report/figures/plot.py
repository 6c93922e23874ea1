"""What a figure shows, in data units; `kvlab.report.figures.axes` draws it."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["ink", "muted", "c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"]
"""A colour by its purpose; the themes decide on the colours."""

Shape = Literal["dot", "square", "diamond", "triangle", "ring"]

SERIES: tuple[Role, ...] = ("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7")


@dataclass(frozen=True)
class Point:
    """One point.

    Attributes:
        x: Position on the x axis.
        y: Position on the y axis.
        tip: Lines shown on hovering.
        key: Key of the design's cell, for selection across the page.
        label: Text beside the mark, where there is space.
        x_range: Ends of the horizontal error bar.
        y_range: Ends of the vertical error bar.
        seeds: Values at each seed, drawn as small dots: along the x axis if the y axis has names,
            else along the y axis.
    """

    x: float
    y: float
    tip: tuple[str, ...] = ()
    key: str = ""
    label: str = ""
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    seeds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Points:
    """A series of marks. ``name`` is its entry in the legend."""

    name: str
    points: tuple[Point, ...]
    role: Role = "c0"
    shape: Shape = "dot"


@dataclass(frozen=True)
class Line:
    """A series joined by a line, without marks; its points still answer to hovering."""

    name: str
    points: tuple[Point, ...]
    role: Role = "c0"
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        title: The axis' title.
        kind: ``bytes`` and ``log`` are logarithmic, on the x axis alone. ``names`` has one row per
            name at y = 0, 1, ..., the first on top; on the x axis one vertical axis per name.
        names: Names of the rows, or of the vertical axes.
    """

    title: str
    kind: Literal["linear", "bytes", "log", "names"] = "linear"
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reference:
    """A line across the plot where an axis has this value, such as zero or a margin."""

    axis: Literal["x", "y"]
    value: float
    is_dashed: bool = False


@dataclass(frozen=True)
class Plot:
    """Layers on two axes, drawn in order, with lines of reference under them."""

    x: Axis
    y: Axis
    layers: tuple[Points | Line, ...]
    references: tuple[Reference, ...] = ()
