"""Sections say so where numbers are no finding, and what their other numbers are of."""

import ast
from pathlib import Path

from jinja2 import meta

from kvlab.report import texts
from tests.report.reading import load, markdown
from tests.support.record_factory import Record

FACTORS = {"heads": ("mha", "mqa"), "sharing": ("none", "tied")}


def test_the_one_shot_loss_beside_the_served_one_is_of_the_same_text(tmp_path):
    def change(found, *_):
        found["measurements"] |= {"loss": 9.0, "loss_tokens": 16_384, "served_tokens": 4096}

    for section in ("cells", "serving-gap"):
        study = load(Record(factors=FACTORS, change=change), tmp_path / section, section)
        served, gap = (study.mean(("mha", "tied"), m) for m in ("loss_served", "serving_gap"))
        text = markdown(study)
        assert f"{served - gap:.4f}" in text
        assert "9.0000" not in text


def test_every_text_is_used_with_its_fields():
    writers, environment = {"texts.fill", "texts.spans", "texts.write"}, texts.make_environment()
    known = {
        name: meta.find_undeclared_variables(environment.parse(text)) - set(environment.globals)
        for name, text in texts.read_texts().items()
    }
    used = set()
    for path in Path(texts.__file__).parent.rglob("*.py"):
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
