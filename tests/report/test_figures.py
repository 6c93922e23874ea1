"""Figures: labels, and titles on every mark; those of the page follow its theme."""

import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from kvlab.report.document import SERIES, Axis, Line, Plot, Point, Points, Reference, draw_series
from kvlab.report.figures import draw_plot, figure_style, render_files, render_inline_svg

SIZES = (2**20, 2**22, 2**24)


def point(x, y, name, **more):
    return Point(x, y, (name, "second line"), f"key-{name}", **more)


FRONT = Points(
    "front", tuple(point(x, 4.0 - n, f"p{n}", label=f"p{n}", y_range=(3.5 - n, 4.5 - n),
                         seeds=(3.8 - n, 4.1 - n)) for n, x in enumerate(SIZES)), "c1", "diamond",
)  # fmt: skip
LINE = Line("line", tuple(point(x, 5.0, f"l{n}") for n, x in enumerate(SIZES)), "c2", "dashed")
AXES = (Axis("stored", "bytes"), Axis("loss <&> $x$"))
PLOT = Plot(*AXES, (FRONT, LINE), (Reference("y", 2.0, True),))
NAMED = Plot(
    Axis("difference"),
    Axis("", "names", ("first", "second")),
    (Points("", (point(-0.5, 0, "a", x_range=(-1, 0)), point(0.5, 1, "b", seeds=(0.2, 0.9)))),),
    (Reference("x", 0.0),),
)


def drawn(plot, width=6.4):
    with figure_style("made"):
        figure = draw_plot(plot, width)
        figure.draw_without_rendering()
        return figure, figure.axes[0]


def titles(svg):
    """Title of each circle -> its middle and its cell."""
    circles = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}circle")
    places = [(one, float(one.get("cx")), float(one.get("cy"))) for one in circles]
    return [(one[0].text, x, y, one.get("data-key")) for one, x, y in places]


def inline(plot):
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return render_inline_svg(plot, "made", "described").replace("<svg", f"<svg {names}", 1)


@pytest.mark.parametrize("plot", [PLOT, NAMED])
def test_the_page_decides_on_every_colour(plot):
    text = inline(plot)
    assert not re.search(r"#[0-9a-f]{6}|rgb\(", text)
    assert "var(--c1)" in text or "var(--c0)" in text


def test_every_mark_has_a_title_with_its_values_and_belongs_to_its_cell():
    found = titles(render_files(PLOT, "made")[0])
    points = [p for layer in PLOT.layers for p in layer.points]
    of_cells = {(title, key) for title, _, _, key in found if key}
    assert of_cells == {("\n".join(p.tip), p.key) for p in points}
    seeds = [title for title, _, _, key in found if not key]
    values = [(p.tip[0], value) for p in FRONT.points for value in p.seeds]
    assert seeds == [f"{name}\none seed: {value:.4g}" for name, value in values]
    assert found == titles(inline(PLOT))


def test_titles_are_where_the_marks_are():
    """Their middles follow the scales: bytes logarithmic, larger losses further up."""
    places = {title.split("\n")[0]: (x, y) for title, x, y, key in titles(inline(PLOT)) if key}
    (x0, y0), (x1, y1), (x2, y2) = (places[f"p{n}"] for n in range(3))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 < y1 < y2
    assert y1 - y0 == pytest.approx(y0 - places["l0"][1], abs=0.2), "losses 5, 4 and 3"
    assert x0 == places["l0"][0]


def test_titles_and_descriptions_are_escaped():
    bad = '"><script>alert(1)</script>\x1b'
    plot = Plot(Axis(bad), Axis("y"), (Points("", (Point(1, 1, (bad,), bad, bad),)),))
    text = render_inline_svg(plot, "made", bad)
    assert "<script" not in text
    assert "\x1b" not in text
    assert 'data-key="&quot;&gt;&lt;script' in text


def test_static_figures_show_seeds_bars_references_and_a_legend():
    figure, axes = drawn(PLOT)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["front", "line"]
    assert sorted(len(line.get_xdata()) for line in axes.lines) == [2, 3, 3, 6]
    bars = [tuple(path.vertices[:, 1]) for one in axes.collections for path in one.get_paths()]
    assert bars == [p.y_range for p in FRONT.points]
    assert {"1 MiB", "4 MiB"} <= {label.get_text() for label in axes.get_xticklabels()}


def test_lines_that_lie_close_differ_in_dashes_and_marks():
    """No two lines have both alike, and marks of lines at one place are not all at one point."""
    points = [Point(x, 1.0) for x in range(7)]
    lines = [draw_series(number, f"line {number}", points) for number in range(len(SERIES))]
    _, axes = drawn(Plot(Axis("x"), Axis("y"), tuple(lines)))
    styles = {
        (one.get_linestyle(), one.get_marker(), one.get_markerfacecolor() == "white")
        for one in axes.lines
    }
    assert len(styles) == len(SERIES)
    assert {one.get_markevery() for one in axes.lines} == {(0, 3), (1, 3), (2, 3)}


def test_every_label_of_a_front_is_written_and_meets_neither_others_nor_marks():
    crowd = tuple(point(x / 12, -x / 40 + (x % 3) / 30, f"cell+number{x}", label=f"cell+number{x}")
                  for x in range(12))  # fmt: skip
    _, axes = drawn(Plot(Axis("x"), Axis("y"), (Points("crowd", crowd),)))
    boxes = [label.get_window_extent() for label in axes.texts if label.get_text()]
    centers = axes.transData.transform([(p.x, p.y) for p in crowd])
    assert len(boxes) == len(crowd)
    assert not [1 for one, other in combinations(boxes, 2) if one.overlaps(other)]
    assert not [1 for box in boxes for center in centers if box.contains(*center)]


@pytest.mark.parametrize(
    ("kind", "values", "ticks"),
    [
        ("bytes", (2**18, 2**18), ["128 KiB", "256 KiB", "512 KiB"]),
        ("bytes", (70 * 2**10, 2**18), ["96 KiB", "128 KiB", "192 KiB", "256 KiB"]),
        ("bytes", (2**10, 2**30), ["512 B", "32 KiB", "2 MiB", "128 MiB"]),
        ("log", (0.4, 0.85), ["0.45", "0.60", "0.75"]),
        ("log", (2e-3, 0.02), ["0.002", "0.005", "0.01", "0.02"]),
        (
            "log",
            (1e-8, 0.01),
            ["1e\N{MINUS SIGN}8", "1e\N{MINUS SIGN}6", "1e\N{MINUS SIGN}4", "0.01"],
        ),
    ],
)
def test_a_logarithmic_axis_has_three_ticks_or_more_and_shows_marks_at_one_place(
    kind, values, ticks
):
    points = Points("", tuple(Point(x, y) for y, x in enumerate(values)))
    _, axes = drawn(Plot(Axis("x", kind), Axis("y"), (points,)), 3.3)
    low, high = axes.get_xlim()
    assert low < min(values) <= max(values) < high
    assert [label.get_text() for label in axes.get_xticklabels()] == ticks


def test_marks_at_one_place_share_a_label_which_no_line_strikes_through():
    crowd = (point(2.0, 1.0, "a", label="base"), point(2.0, 1.0, "b", label="other"))
    steps = Line("", (Point(1.0, 1.0), Point(3.0, 1.0)), "c0")
    lines = (Reference("y", 1.0),)
    _, axes = drawn(Plot(Axis("x"), Axis("y"), (Points("", crowd), steps), lines))
    (label,) = axes.texts
    assert label.get_text() == "base, other"
    box = label.get_window_extent()
    assert not box.y0 < axes.transData.transform((2.0, 1.0))[1] < box.y1


def test_names_are_listed_from_the_top_and_nothing_is_cut_off():
    long = Plot(
        Axis("difference"), Axis("", "names", ("a-rather-long-factor=a-long-level", "b")),
        (Points("differs", (point(0.5, 0, "a"),)), Points("not told apart", (point(1, 1, "b"),))),
    )  # fmt: skip
    figure, axes = drawn(long, 4.0)
    first, second = (label.get_window_extent() for label in axes.get_yticklabels())
    assert first.y0 > second.y0
    assert min(first.x0, second.x0) >= 0
    assert figure.legends[0].get_window_extent().x1 <= figure.bbox.x1


def test_files_are_the_same_again_and_take_dollars_literally():
    first, second = render_files(PLOT, "made"), render_files(PLOT, "made")
    assert first == second
    svg, png = first
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert png.startswith(b"\x89PNG")
    assert inline(PLOT) == inline(PLOT)
    assert "loss &lt;&amp;&gt; $x$" in inline(PLOT)
