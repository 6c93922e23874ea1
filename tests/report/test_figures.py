"""Figures: the page's follow its theme and answer for every point; files are labelled."""

import json
import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from kvlab.report.figures.axes import draw_plot, figure_style, render_files, render_static_svg
from kvlab.report.figures.plot import Axis, Line, Plot, Point, Points, Reference
from kvlab.report.figures.vega_lite import vega_lite_spec

SIZES = (2**20, 2**22, 2**24)


def point(x, y, name, **more):
    return Point(x, y, (name, "second line"), f"key-{name}", **more)


FRONT = Points(
    "front", tuple(point(x, 4.0 - n, f"p{n}", label=f"p{n}", y_range=(3.5 - n, 4.5 - n),
                         seeds=(3.8 - n, 4.1 - n)) for n, x in enumerate(SIZES)), "c1", "diamond",
)  # fmt: skip
LINE = Line("line", tuple(point(x, 5.0, f"l{n}") for n, x in enumerate(SIZES)), "c2", dashed=True)
PLOT = Plot(
    Axis("stored", "bytes"), Axis("loss <&> $x$"), (FRONT, LINE), (Reference("y", 2.0, True),)
)
NAMED = Plot(
    Axis("difference"),
    Axis("", "names", ("first", "second")),
    (Points("", (point(-0.5, 0, "a", x_range=(-1, 0)), point(0.5, 1, "b", seeds=(0.2, 0.9)))),),
    (Reference("x", 0.0),),
)


def rows(spec, start):
    layers = [layer for layer in spec["layer"] if layer.get("name", "").startswith(start)]
    return [row for layer in layers for row in layer["data"]["values"]]


def drawn(plot, width=6.4):
    with figure_style("made"):
        figure = draw_plot(plot, width)
        figure.draw_without_rendering()
        return figure, figure.axes[0]


@pytest.mark.parametrize("plot", [PLOT, NAMED])
def test_the_page_decides_on_every_colour(plot):
    text = json.dumps(vega_lite_spec(plot))
    assert not re.search(r"#[0-9a-f]{6}|rgb\(", text)
    assert "var(--c1)" in text or "var(--c0)" in text


def test_every_point_answers_with_its_values_and_belongs_to_its_cell():
    spec = vega_lite_spec(PLOT)
    marks = rows(spec, "marks_")
    every = [p for layer in PLOT.layers for p in layer.points]
    assert [(row["x"], row["y"], row["key"]) for row in marks] == [(p.x, p.y, p.key) for p in every]
    assert [row["tip"] for row in marks] == ["\n".join(p.tip) for p in every]
    bars = rows(spec, "bars_y")
    assert [(row["y"], row["end"], row["key"]) for row in bars] == [
        (*p.y_range, p.key) for p in FRONT.points
    ]
    assert [row["label"] for row in rows(spec, "anchors")] == ["p0", "p1", "p2"]


def test_axes_hold_bars_seeds_and_references():
    low, high = vega_lite_spec(PLOT)["encoding"]["y"]["scale"]["domain"]
    assert low < 1.5
    assert high > 5.0
    low, high = vega_lite_spec(NAMED)["encoding"]["x"]["scale"]["domain"]
    assert low < -1
    assert high > 0.9


def test_names_are_listed_from_the_top_with_their_marks():
    spec = vega_lite_spec(NAMED)
    start, end = spec["encoding"]["y"]["scale"]["domain"]
    assert start > end
    (names,) = (one["value"] for one in spec["params"] if one["name"] == "names")
    assert names == ["first", "second"]
    _, axes = drawn(NAMED)
    first, second = (label.get_window_extent().y0 for label in axes.get_yticklabels())
    assert first > second


def test_static_figures_show_seeds_bars_references_and_a_legend():
    figure, axes = drawn(PLOT)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["front", "line"]
    assert sorted(len(line.get_xdata()) for line in axes.lines) == [2, 3, 3, 6]
    bars = [tuple(path.vertices[:, 1]) for one in axes.collections for path in one.get_paths()]
    assert bars == [p.y_range for p in FRONT.points]
    assert {"1 MiB", "4 MiB"} <= {label.get_text() for label in axes.get_xticklabels()}


def test_every_label_of_a_front_is_written_and_meets_neither_others_nor_marks():
    crowd = tuple(point(x / 12, -x / 40 + (x % 3) / 30, f"cell+number{x}", label=f"cell+number{x}")
                  for x in range(12))  # fmt: skip
    _, axes = drawn(Plot(Axis("x"), Axis("y"), (Points("crowd", crowd),)))
    boxes = [label.get_window_extent() for label in axes.texts if label.get_text()]
    centers = axes.transData.transform([(p.x, p.y) for p in crowd])
    assert len(boxes) == len(crowd)
    assert not [1 for one, other in combinations(boxes, 2) if one.overlaps(other)]
    assert not [1 for box in boxes for center in centers if box.contains(*center)]


def test_nothing_is_cut_off():
    long = Plot(
        Axis("difference"), Axis("", "names", ("a-rather-long-factor=a-long-level", "b")),
        (Points("differs", (point(0.5, 0, "a"),)), Points("not told apart", (point(1, 1, "b"),))),
    )  # fmt: skip
    figure, axes = drawn(long, 4.0)
    for label in axes.get_yticklabels():
        assert label.get_window_extent().x0 >= 0
    assert figure.legends[0].get_window_extent().x1 <= figure.bbox.x1


def test_files_are_the_same_again_and_take_dollars_literally():
    first, second = render_files(PLOT, "made"), render_files(PLOT, "made")
    assert first == second
    svg, png = first
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert png.startswith(b"\x89PNG")
    static = render_static_svg(PLOT, "made")
    assert static == render_static_svg(PLOT, "made")
    assert b"loss &lt;&amp;&gt; $x$" in static
