"""Every section of the table holds to the contract of report sections, and uses its texts."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest
from jinja2 import meta

import kvlab
from kvlab.own_extensions import load_parts
from kvlab.report import texts
from kvlab.report.sections import SECTIONS
from tests.contracts.section_contract import ReportSectionContract
from tests.report.full_record import RECORD
from tests.report.reading import load, rows, tables
from tests.support.record_factory import MatchedRecord, Record

TOP_FIVE = (Path(__file__).parents[2] / "docs" / "extend" / "top_five.py").read_text()


def add_metric(result, _levels, _seed):
    """Give a result what a file of its experiment measures."""
    result["experiment"]["extensions"] = {"top_five.py": TOP_FIVE}
    result["measurements"] |= {"top_five": 0.5, "top_five_served": 0.25}


OWN_RECORDS = {
    "extensions": Record(change=add_metric),
    "matched": MatchedRecord(),
    "divergence": Record(
        status=lambda levels, _: "diverged" if "mqa" in levels.values() else "done"
    ),
}
"""Section -> a record that it reports; the others report the full one."""

for extension, parts in load_parts().items():
    for section in parts.sections:
        made = import_module(f"tests.extensions.{extension}.records").RECORD
        OWN_RECORDS[section.name] = made

RANGE = re.compile(r"[\d.]\s*(to|of|[\u00b1\u00d7\u2013])\s*[-+\u2212]?\d|\u2212\d")


@pytest.fixture(scope="module", params=list(SECTIONS))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def full_study(tmp_path_factory):
    return load(RECORD, tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def study(name, full_study, tmp_path_factory):
    own = OWN_RECORDS.get(name)
    return full_study if own is None else load(own, tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def empty_study(tmp_path_factory):
    return load(Record(status=lambda *_: "missing"), tmp_path_factory.mktemp("empty"))


class TestSections(ReportSectionContract):
    def test_a_column_of_a_csv_is_text_or_numbers_alone(self, name, study):
        section = self.table[name].make(study)
        for table in tables(section).values():
            worded = {head for c in table.columns if not c.numeric for head in c.csv or (c.title,)}
            for row in rows(section, table.name):
                for head, text in row.items():
                    if text and head not in {*worded, "unit"}:
                        float(text)
                    assert not (head in worded and RANGE.search(text)), (table.name, head)


def test_every_text_is_used_with_its_fields():
    writers, environment = {"texts.fill", "texts.spans", "texts.write"}, texts.make_environment()
    known = {
        name: meta.find_undeclared_variables(environment.parse(text)) - set(environment.globals)
        for name, text in texts.read_texts().items()
    }
    used = set()
    for path in Path(kvlab.__file__).parent.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        keys = (key for node in nodes if isinstance(node, ast.Dict) for key in node.keys)
        in_dicts = {key.value for key in keys if isinstance(key, ast.Constant)}
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in writers:
                name, fields = node.args[0].value, {keyword.arg for keyword in node.keywords}
                used.add(name)
                if None in fields:  # more are in a dictionary of the module
                    fields = (fields - {None}) | (in_dicts & known[name])
                assert fields == known[name], name
    assert used == known.keys()
