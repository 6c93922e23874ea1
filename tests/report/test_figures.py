"""Figures: inside the page they follow its theme and answer for every point; files are labelled."""

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

from kvlab.report.figures.axes import default_settings, draw_plot, render_files
from kvlab.report.figures.inline_svg import render_inline_svg
from kvlab.report.figures.plot import Axis, Line, Plot, Point, Points

SIZES = (2**20, 2**22, 2**24)


def point(x, y, name, **more):
    return Point(x, y, (name, "second line"), f"key-{name}", **more)


FRONT = Points(
    "front", tuple(point(x, 4.0 - n, f"p{n}", label=f"p{n}", y_range=(3.5 - n, 4.5 - n))
                   for n, x in enumerate(SIZES)), "c1", "diamond",
)  # fmt: skip
LINE = Line("line", tuple(point(x, 5.0, f"l{n}") for n, x in enumerate(SIZES)), "c2", dashed=True)
PLOT = Plot(Axis("stored", "bytes"), Axis("loss <&> $x$"), (FRONT, LINE))
NAMED = Plot(
    Axis("difference"),
    Axis("", "names", ("first", "second")),
    (Points("", (point(-0.5, 0, "a", x_range=(-1, 0)), point(0.5, 1, "b"))),),
    zero=True,
)


def elements(plot, width=880):
    text = render_inline_svg(plot, width, "words & more", "wide")
    return text, ElementTree.fromstring(text)


def marks(root):
    return {g.get("data-key"): g for g in root if g.get("class", "").startswith("mark")}


@pytest.mark.parametrize("width", [880, 368])
@pytest.mark.parametrize("plot", [PLOT, NAMED])
def test_the_page_decides_on_every_colour(plot, width):
    text, root = elements(plot, width)
    assert not re.search(r"#[0-9a-f]{6}|style=|rgb\(", text)
    assert root.get("aria-label") == "words & more"
    classes = {element.get("class") for element in root}
    assert {"f-ink", "s-grid"} <= classes
    assert float(root.get("width")) == width


def test_every_point_answers_where_it_is_drawn():
    _, root = elements(PLOT)
    by_key = marks(root)
    assert by_key.keys() == {p.key for layer in PLOT.layers for p in layer.points}
    for layer in PLOT.layers:
        places = [by_key[p.key] for p in layer.points]
        xs = [float(place.get("data-x")) for place in places]
        gaps = [right - left for left, right in pairwise(xs)]
        assert gaps[0] == pytest.approx(gaps[1], abs=0.2), "equal factors are equally far apart"
        assert 0 < xs[0] < xs[-1] < 880
        assert [place.find("title").text.split("\n")[0] for place in places] == [
            p.tip[0] for p in layer.points
        ]
    assert by_key["key-p0"].find("polygon") is not None
    assert by_key["key-l0"].find("circle") is None, "a line's points show on hovering alone"


def test_what_belongs_to_a_point_is_selected_with_it():
    """Its error bar with both caps, and its label; the line and its legend have one key."""
    _, root = elements(PLOT)
    keys = [element.get("data-key") for element in root if element.tag in ("path", "text")]
    assert {key: keys.count(key) for key in keys if key} == {
        **{f"key-p{n}": 4 for n in range(3)},
        "key-l0": 3,
    }


def test_names_are_listed_from_the_top_with_their_marks():
    _, root = elements(NAMED)
    heights = {t.text: float(t.get("y")) for t in root if t.tag == "text"}
    assert heights["first"] < heights["second"]
    by_key = marks(root)
    for name, key in (("first", "key-a"), ("second", "key-b")):
        assert float(by_key[key].get("data-y")) == pytest.approx(heights[name], abs=8)


def test_an_axis_that_reaches_ten_thousand_separates_thousands():
    line = Line("", (Point(-20_000, 0.0), Point(20_000, 9_000.0)))
    _, root = elements(Plot(Axis("x"), Axis("y"), (line,)))
    labels = {element.text for element in root if element.tag == "text"}
    assert {"\N{MINUS SIGN}20,000", "5,000", "20,000"} <= labels
    assert {"2000", "8000"} <= labels


def test_labels_meet_neither_each_other_nor_marks():
    crowd = tuple(point(x / 10, (x % 3) / 50, f"cell number {x}", label=f"cell number {x}")
                  for x in range(24))  # fmt: skip
    plot = Plot(Axis("x"), Axis("y"), (Points("crowd", crowd),))
    with default_settings("made"):
        drawn = draw_plot(plot, 880)
        boxes = [label.get_window_extent() for label in drawn.axes.texts]
        centers = drawn.axes.transData.transform([(p.x, p.y) for p in crowd])
    assert 3 <= len(boxes) < len(crowd)
    assert not [1 for one, other in combinations(boxes, 2) if one.overlaps(other)]
    assert not [1 for box in boxes for center in centers if box.contains(*center)]


def test_files_are_the_same_again_and_take_dollars_literally():
    first, second = render_files(PLOT, "made"), render_files(PLOT, "made")
    assert first == second
    svg, png = first
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert png.startswith(b"\x89PNG")
