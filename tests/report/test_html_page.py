"""report.html in a real browser: sorts, filters, selects both ways, unfolds, by mouse and keys.

Everything in both themes, by the system's preference, and on a telephone and a wide screen.
"""

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from kvlab.report.html_page import render_html
from kvlab.report.report_files import make_document
from tests.report.reading import load
from tests.support.browser import Browser
from tests.support.record_factory import Record, no_learned_hybrid

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")

REPORTS = Path(__file__).parents[2] / "reports"

VIEWS = ((400, "dark"), (1400, "light"))
LOSS, CI = "served loss (nats/token)", "simultaneous 95%"

TOOLS = """
window.tableOf = (name) => document.getElementById("table-" + name);
window.heads = (name) => [...tableOf(name).tHead.rows[0].cells].map((head) => head.textContent);
window.rowsOf = (name) => [...tableOf(name).tBodies[0].rows];
window.column = (name, title) => rowsOf(name).map(
  (row) => row.cells[heads(name).indexOf(title)].textContent);
window.headOf = (name, title) => tableOf(name).tHead.rows[0].cells[heads(name).indexOf(title)];
window.seen = (element) =>
  element.getBoundingClientRect().width > 0 && element.checkVisibility({ contentVisibilityAuto: true });
window.markOf = (name, label) => [...document.querySelectorAll("#figure-" + name + " circle")].find(
  (one) => one.dataset.key && one.textContent.split("\\n")[0] === label);
window.topmostOf = async (name) => {
  for (const one of document.querySelectorAll("#figure-" + name + " circle")) {
    const { x, y } = await middle(one);
    const isListed = tableOf("ablation").querySelector(`[data-key="${one.dataset.key}"]`);
    if (isListed && document.elementFromPoint(x, y) === one)
      return one.textContent.split("\\n")[0];
  }
};
window.middle = async (element) => {
  element.scrollIntoView({ block: "center", inline: "center" });
  await settled();
  const box = element.getBoundingClientRect();
  return { x: box.x + box.width / 2, y: box.y + box.height / 2 };
};
window.pickedIn = (place) => [...new Set([...place.querySelectorAll(".picked[data-key]")].map(
  (element) => element.dataset.key))];
window.filterOf = (name) =>
  tableOf(name).parentNode.previousElementSibling.querySelector("input[type=search]");
const frame = () => new Promise(requestAnimationFrame);
window.settled = async () => { await frame(); await frame(); };
1
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    home = tmp_path_factory.mktemp("page")
    record = Record(exclude=no_learned_hybrid, seeds=(0, 1), items=20)
    path = home / "report.html"
    path.write_text(render_html(make_document(load(record, home / "store"))), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(CHROMIUM, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def opened(browser, report):
    browser.look(1400, "light")
    browser.open(report)
    browser.run(TOOLS)
    return browser


@pytest.fixture(params=VIEWS, ids=lambda view: f"{view[0]}-{view[1]}")
def page(request, opened):
    """The page in each view, with nothing selected or filtered."""
    opened.look(*request.param)
    opened.run("settled()")
    opened.press("Escape")
    yield opened
    assert opened.errors == []


def numbers(texts):
    return [float(text.split()[0].replace("\N{MINUS SIGN}", "-")) for text in texts]


def test_the_view_is_what_was_asked_for(page, request):
    width, theme = request.node.callspec.params["page"]
    assert page.run("innerWidth") == width
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[theme]
    assert page.run("document.documentElement.scrollWidth <= innerWidth"), "tables scroll inside"
    names = page.run('[...document.querySelectorAll("figure")].filter(seen).map((f) => f.id)')
    assert len(names) > 2
    assert page.run(
        "[...document.querySelectorAll('figure svg')].every("
        "(svg) => svg.getBoundingClientRect().right <= innerWidth)"
    )
    # The button changes to the other theme, and back.
    assert page.run('document.getElementById("theme").textContent') == (
        "Dark theme" if theme == "light" else "Light theme"
    )
    page.run('document.getElementById("theme").click()')
    assert page.run("getComputedStyle(document.body).backgroundColor") != ground
    page.run('document.getElementById("theme").click()')
    assert page.run("getComputedStyle(document.body).backgroundColor") == ground
    page.run("delete document.documentElement.dataset.theme; localStorage.clear()")


def test_sorting_by_mouse_and_by_key(page):
    before = numbers(page.run(f'column("cells", "{LOSS}")'))
    page.click(page.run(f'middle(headOf("cells", "{LOSS}").querySelector("button"))'))
    first = page.run(f'headOf("cells", "{LOSS}").ariaSort')
    values = numbers(page.run(f'column("cells", "{LOSS}")'))
    assert values == sorted(before, reverse=first == "descending")
    page.press("Enter")  # the head has the focus
    second = page.run(f'headOf("cells", "{LOSS}").ariaSort')
    assert {first, second} == {"ascending", "descending"}
    values = numbers(page.run(f'column("cells", "{LOSS}")'))
    assert values == sorted(before, reverse=second == "descending")
    page.run(f'headOf("cells", "{CI}").querySelector("button").focus()')
    page.press(" ")
    intervals = page.run(f'column("cells", "{CI}")')
    assert intervals[-1] == "\N{EN DASH}", "what has no number stays last"
    lows = numbers(text for text in intervals if text != "\N{EN DASH}")
    descending = page.run(f'headOf("cells", "{CI}").ariaSort') == "descending"
    assert lows == sorted(lows, reverse=descending), "by its lower end, as the page says"
    assert "lower end" in page.run('document.getElementById("help-text").textContent')


def test_filtering(page):
    every = page.run('rowsOf("cells").length')
    page.run('filterOf("cells").focus(); filterOf("cells").select()')
    page.write("mqa tied")
    shown = page.run('rowsOf("cells").filter(seen).map((row) => row.textContent)')
    assert len(shown) == 3
    assert all("mqa" in text and "tied" in text for text in shown)
    status = page.run('filterOf("cells").parentNode.textContent')
    assert f"3 of {every} rows" in status
    stops = '[...tableOf("cells").querySelectorAll("tr[tabindex=\\"0\\"]")].filter(seen).length'
    assert page.run(stops) == 1, "the keyboard can still come to a row"
    page.run('filterOf("cells").value = ""; filterOf("cells").dispatchEvent(new Event("input"))')
    assert page.run('rowsOf("cells").filter(seen).length') == every
    missing = page.run(
        '[...document.querySelectorAll("table")].filter((t) => t.tBodies[0].rows.length > 12 &&'
        ' !t.parentNode.previousElementSibling.querySelector("input")).map((t) => t.id)'
    )
    assert missing == []


def test_selecting_in_a_figure_selects_in_tables_and_other_figures(page):
    label = page.run('topmostOf("pareto")')
    mark = f'markOf("pareto", "{label}")'
    key = page.run(f"{mark}.dataset.key")
    page.click(page.run(f"middle({mark})"))
    for place in ('tableOf("ablation")', 'tableOf("cells")', f"{mark}.parentNode"):
        assert page.run(f"pickedIn({place})") == [key]
    current = page.run('rowsOf("cells").filter((row) => row.ariaCurrent === "true").length')
    assert current == 1
    assert page.run('document.getElementById("said").textContent') == f"Selected: {label}"
    page.click(page.run(f"middle({mark})"))
    assert page.run('document.querySelectorAll(".picked").length') == 0
    assert page.run('document.querySelectorAll("[aria-current]").length') == 0


def test_a_button_and_a_printer_open_all_folds(page):
    counts = "[folds.length, folds.filter((fold) => fold.open).length]"
    page.run("window.folds = [...document.querySelectorAll('main details')]")
    page.run('document.getElementById("folds").click()')
    every, opened = page.run(counts)
    assert every == opened > 2
    page.run('document.getElementById("folds").click()')
    assert page.run(counts) == [every, 0]
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.run(counts) == [every, every]
    page.run("dispatchEvent(new Event('afterprint'))")
    assert page.run(counts) == [every, 0]


def test_the_quickstart_page_is_short_and_cuts_nothing_however_it_is_unfolded(tmp_path):
    with closing(Browser(CHROMIUM, tmp_path)) as page:
        page.look(1400, "light")
        page.open(REPORTS / "quickstart" / "report.html")
        page.run(TOOLS)
        page.run("window.folds = [...document.querySelectorAll('main details')]")
        assert page.run("folds.length") > 10
        tallest = page.run("""(async () => {
            let tallest = 0;
            for (const fold of folds) {
              fold.open = true;
              await settled(); // a table that is too wide wraps its numbers
              for (const box of fold.querySelectorAll(".table"))
                if (box.scrollWidth > box.clientWidth) throw new Error(box.ariaLabel);
              tallest = Math.max(tallest, document.documentElement.scrollHeight);
            }
            return tallest;
        })()""")
    assert 3000 < tallest < 6200


def test_keys_go_through_rows_and_tab_to_heads_and_one_row(page):
    page.run('tableOf("effects").querySelector("tr[tabindex=\\"0\\"]").focus()')
    start = page.run('rowsOf("effects").indexOf(document.activeElement)')
    for key in ("ArrowDown", "ArrowDown", "ArrowUp"):
        page.press(key)
    assert page.run('rowsOf("effects").indexOf(document.activeElement)') == start + 1
    page.press("Enter")
    key = page.run("document.activeElement.dataset.key")
    assert page.run('pickedIn(document.getElementById("figure-pareto"))') == [key]
    page.press(" ")
    assert page.run('document.querySelectorAll(".picked").length') == 0
    page.press("ArrowUp")
    page.run('tableOf("ablation").parentNode.focus()')
    found = []
    for _ in range(page.run('heads("ablation").length') + 1):
        page.press("Tab")
        found.append(page.run(
            "[document.activeElement.tagName, document.activeElement.closest('table')?.id ?? '']"
        ))  # fmt: skip
    assert all(one == ["BUTTON", "table-ablation"] for one in found[:-1])
    assert found[-1] == ["TR", "table-ablation"]
