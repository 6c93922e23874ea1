"""Names, errors and questions with HTML, Markdown, LaTeX or formulas in them do no harm."""

import csv
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from kvlab.report import write_report
from kvlab.report.html_page import render_html
from kvlab.report.report_files import make_document
from tests.report.reading import load
from tests.support.record_factory import Record

HOSTILE = (
    "<script>alert(1)</script> | `x` `` <img src=x onerror=alert(1)> [a](javascript:b) **b** \x1b[31m"
    " \u202egnp.exe $\\alpha$ & &amp; https://evil.example www.evil.example @team\n# head\n- list"
)


class Elements(HTMLParser):
    """Every element, attribute and piece of visible text."""

    def __init__(self):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.texts.append(data)


class Hostile(Record):
    def bytes(self, levels):
        return 2048 if levels["heads"] == "mha" else 1024


def hostile_record() -> Record:
    bad = 'mqa"><svg onload=alert(1)>|`'
    return Hostile(
        factors={"heads": ("mha", bad), "<b>f</b>": ("none", "a|b")},
        question=HOSTILE,
        error=HOSTILE + "\ud800",
        items=20,
        status=lambda levels, seed: "failed" if seed == 2 and levels["heads"] == "mha" else "done",
    )


@pytest.fixture(scope="module")
def hostile_report(tmp_path_factory):
    home = tmp_path_factory.mktemp("hostile")
    sections = ["answer", "effects", "cells", "hellaswag", "curves", "failures", "provenance"]
    return write_report(hostile_record().write(home / "store"), "made", home, sections)


@pytest.fixture(scope="module")
def plain_page(tmp_path_factory):
    record = Record(factors={"heads": ("mha", "mqa"), "sharing": ("none", "tied")}, items=40)
    return render_html(make_document(load(record, tmp_path_factory.mktemp("plain"))))


def test_hostile_texts_do_no_harm_in_html(hostile_report, plain_page):
    page = (hostile_report / "report.html").read_text(encoding="utf-8")
    harmless = Elements()
    harmless.feed(plain_page)
    found = Elements()
    found.feed(page)
    assert set(found.tags) <= set(harmless.tags) | {"li", "ul"}
    assert found.tags.count("script") == 1
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert "<script>alert(1)</script> | `x`" in "".join(found.texts)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", page)


def test_hostile_texts_do_no_harm_in_markdown(hostile_report):
    text = (hostile_report / "report.md").read_text(encoding="utf-8")
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(text)
    inline = [child for token in tokens for child in token.children or []]
    assert not [t for t in inline if t.type == "html_inline"]
    html = [t.content for t in tokens if t.type == "html_block"]
    assert all(re.match(r"</?details>", block) for block in html)
    links = [t.attrs["href"] for t in inline if t.type == "link_open"]
    ours = re.compile(r"(tables|figures|report\.html|results\.(jsonl|csv))")
    assert all(map(ours.match, links))
    headings = [tokens[n + 1].content for n, t in enumerate(tokens) if t.type == "heading_open"]
    assert "head" not in headings
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    for table in tables:
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(cells) == 1, table
    shown = "".join(t.content for t in inline if t.type in ("text", "code_inline"))
    assert "<script>alert(1)</script> | " in shown


def test_hostile_texts_do_no_harm_in_pictures(hostile_report):
    pictures = sorted((hostile_report / "figures").glob("*.svg"))
    assert len(pictures) >= 3
    for path in pictures:
        for element in ElementTree.parse(path).iter():
            assert element.tag.split("}")[1] not in ("script", "foreignObject", "image", "a")
            assert not [name for name in element.attrib if name.startswith("on")]
            links = [v for name, v in element.attrib.items() if name.endswith("href")]
            assert all(link.startswith("#") for link in links)
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_hostile_texts_do_no_harm_in_csv(tmp_path):
    record = hostile_record()
    record.error = "=cmd|' /C calc'!A0\n,\"x\"\r\n@SUM(1)"
    folder = write_report(record.write(tmp_path / "store"), "made", tmp_path, ["failures"])
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    assert {row["factor.<b>f</b>"] for row in found} == {"none", "a|b"}
    assert record.error in {row.get("error.message") for row in found}
    for name in ("results.csv", "tables/failures.csv"):
        with (folder / name).open(newline="") as file:
            table = list(csv.reader(file))
        assert {len(row) for row in table} == {len(table[0])}
        assert len(table) > 1
        assert not [value for row in table for value in row if value[:1] in [*"=+@\t"]]
