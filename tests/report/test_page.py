"""report.html in a real browser: sorts, filters, hovers, selects, changes theme, without errors."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from kvlab.report import write_report
from tests.report.factory import Record, no_learned_hybrid

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-sync", "--disable-background-networking", "--disable-component-update",
    "--hide-scrollbars",
]  # fmt: skip

# Runs in the page after its own script; what it finds is read from the dumped document.
SCRIPT = """
const found = {};
const table = document.getElementById("table-cells");
const names = [...table.tHead.rows[0].cells].map((head) => head.textContent);
const column = (name) => [...table.tBodies[0].rows].map(
  (row) => row.cells[names.indexOf(name)].textContent);
const press = (name) => table.tHead.querySelectorAll("button")[names.indexOf(name)].click();
found.before = column("served loss (nats/token)");
press("served loss (nats/token)");
found.ascending = column("served loss (nats/token)");
found.aria = table.tHead.rows[0].cells[names.indexOf("served loss (nats/token)")].ariaSort;
press("served loss (nats/token)");
found.descending = column("served loss (nats/token)");
press("95% CI");
found.intervals = column("95% CI");
const input = table.parentNode.previousElementSibling.querySelector("input");
input.value = "mqa tied";
input.dispatchEvent(new Event("input"));
found.shown = [...table.tBodies[0].rows].filter((row) => !row.hidden).map(
  (row) => row.textContent);
input.value = "";
input.dispatchEvent(new Event("input"));

const visible = (element) => element.getBoundingClientRect().width > 0;
const plots = [...document.querySelectorAll("svg.plot")];
const plot = plots.find((svg) => visible(svg) && svg.closest("#figure-pareto"));
const tip = document.getElementById("tip");
const mark = plot.querySelector(".mark.f-c1[data-key]");
const place = mark.getBoundingClientRect();
const where = { clientX: place.x + place.width / 2, clientY: place.y + place.height / 2,
                bubbles: true };
plot.dispatchEvent(new PointerEvent("pointermove", where));
found.hover = tip.hidden ? "" : tip.textContent;
plot.dispatchEvent(new MouseEvent("click", where));
found.picked = [...document.querySelectorAll("tr.picked")].map((row) => row.dataset.key);
found.key = mark.dataset.key;
plot.dispatchEvent(new PointerEvent("pointerleave", where));
found.left = tip.hidden;
plot.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
found.keys = tip.hidden ? "" : tip.textContent;
document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
found.afterEscape = document.querySelectorAll(".picked").length;

const ground = () => getComputedStyle(document.body).backgroundColor;
found.themes = [ground()];
document.getElementById("theme").click();
found.themes.push(ground());
found.wider = document.documentElement.scrollWidth > window.innerWidth;
found.plotsOnPage = plots.filter(visible).length;
found.figures = document.querySelectorAll("figure").length;
"""


def browse(page, tmp_path, width):
    """What `SCRIPT` finds in the page, and every error that the browser met."""
    text = page.read_text(encoding="utf-8")
    listen = (
        "<script>window.errors = [];"
        "window.addEventListener('error', (e) => errors.push(String(e.message)));"
        "window.addEventListener('securitypolicyviolation', (e) => errors.push(e.blockedURI));"
        "const say = console.error; console.error = (...a) => { errors.push(a.join(' ')); };"
        "</script>"
    )
    report = "found.errors = errors; found.width = window.innerWidth;"
    report += "parent.postMessage(JSON.stringify(found), '*');"
    text = text.replace("<style>", listen + "<style>", 1)
    text = text.replace("</body>", f"<script>{{{SCRIPT}{report}}}</script></body>")
    copy = tmp_path / "page.html"
    copy.write_text(text, encoding="utf-8")
    # In a frame, since no window is narrower than 500 pixels.
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"<iframe src={copy.as_uri()} width={width} height=1000 style='border:0'></iframe>"
        "<pre id=found></pre><script>addEventListener('message', (event) => {"
        "document.getElementById('found').textContent = event.data; });</script>"
    )
    profile = tmp_path / f"profile{width}"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--window-size=1700,1100"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.search(r'<pre id="found">({.*?})</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    return json.loads(unescape(found[1]))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    home = tmp_path_factory.mktemp("page")
    store = Record(exclude=no_learned_hybrid, seeds=(0, 1), items=20).write(home / "store")
    return write_report(store, "made", home) / "report.html"


@pytest.mark.parametrize("width", [1600, 400])
def test_page_in_a_browser(page, tmp_path, width):
    found = browse(page, tmp_path, width)
    assert found["errors"] == []
    assert found["width"] == width

    def numbers(texts):
        return [float(text.split()[0]) for text in texts]

    assert numbers(found["ascending"]) == sorted(numbers(found["before"]))
    assert numbers(found["descending"]) == sorted(numbers(found["before"]), reverse=True)
    assert found["aria"] == "ascending"
    assert found["intervals"][-1] == "\N{EN DASH}"  # what has no number stays last
    assert len(found["shown"]) == 3
    assert all("mqa" in text and "tied" in text for text in found["shown"])
    assert found["hover"].startswith("baseline\n")
    assert found["left"]
    assert found["keys"]
    assert found["picked"]
    assert set(found["picked"]) == {found["key"]}
    assert found["afterEscape"] == 0
    assert found["themes"][0] != found["themes"][1]
    assert not found["wider"], "tables scroll inside, the page does not"
    assert found["plotsOnPage"] == found["figures"], "each figure is drawn at one width"
