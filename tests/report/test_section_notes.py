"""Sections say so where numbers are no finding, and what their other numbers are of."""

import ast
from pathlib import Path

import pytest
from jinja2 import meta

from kvlab.report import texts
from tests.report.reading import load, markdown
from tests.support.record_factory import Record

FACTORS = {"heads": ("mha", "mqa"), "sharing": ("none", "tied")}
ACCURACIES = ("hellaswag_acc", "hellaswag_acc_norm", "hellaswag_acc_norm_served")


def text_of(change, folder, *sections):
    return markdown(load(Record(factors=FACTORS, change=change), folder, *sections))


def accuracies(*shares):
    def change(found, *_):
        found["measurements"] |= dict(zip(ACCURACIES, shares, strict=True))
        found["measurements"] |= {"hellaswag_items": 50, "hellaswag_acc_norm_stderr": 0.01}

    return change


def leaked(share):
    def change(found, *_):
        found["provenance"]["data"]["overlap"] = {"13": 0.5, "50": share}

    return change


def beats_bigrams_by(margin):
    def change(found, levels, _seed):
        measured = found["measurements"]
        own = margin if levels["heads"] == "mqa" else 0.25
        measured |= {"loss_bigram": measured["loss"] + own, "loss_unigram": measured["loss"] + 2}

    return change


def scored_tokens(count):
    def change(found, *_):
        found["experiment"]["training"] |= {"evaluate_tokens": 8192}
        found["measurements"] |= {"loss_tokens": count}

    return change


def timed(how):
    def change(found, _levels, seed):
        found["provenance"]["timings"] = how if seed == 0 else "exclusive"

    return change


@pytest.mark.parametrize(
    ("section", "bad", "good", "words"),
    [
        ("hellaswag", accuracies(0.3, 0.37, 0.2), accuracies(0.6, 0.6, 0.6), "above chance"),
        ("pareto", accuracies(0.3, 0.37, 0.2), accuracies(0.6, 0.6, 0.6), "no front of HellaSwag"),
        ("provenance", leaked(0.305), leaked(0.0058), "Leaked text:"),
        ("answer", beats_bigrams_by(-0.01), beats_bigrams_by(0.05), "\n\n**6 of 12 trained models"),
        ("curves", scored_tokens(16_384), scored_tokens(8192), "does not end at its cell's loss"),
        ("effects", timed("shared"), timed("exclusive"), "4 of 12 trials were timed while"),
    ],
)
def test_numbers_that_are_no_finding_are_said_to_be_none(tmp_path, section, bad, good, words):
    assert words in text_of(bad, tmp_path / "bad", section)
    assert words not in text_of(good, tmp_path / "good", section)


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
