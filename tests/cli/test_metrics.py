"""`kvlab metrics`: the reference of measurements."""

import json
import re

import pytest

from kvlab.cli.main import main
from kvlab.report.sections import SECTIONS
from kvlab.spec.key_reference import list_key_sections
from kvlab.store.metrics import FAMILIES, METRICS, Metric


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_in_one_family(name):
    assert sum(family.holds(name) for family in FAMILIES) == 1


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_a_family_names_sections_and_keys_that_exist(family):
    assert set(family.sections) <= SECTIONS.keys()
    keys = {key.path for one in list_key_sections("experiment") for key in one.keys}
    assert {key for key in family.key.split(", ") if key} <= keys


def test_the_tables_hold_every_metric_once_with_its_unit(capsys):
    assert main(["metrics"]) == 0
    rows = re.findall(
        r"^\| `(\w+)` \| .* \| ([^|]+) \| (lower|higher|neither) \|", capsys.readouterr().out, re.M
    )
    expected = {name: (metric.unit or "share", metric.better) for name, metric in METRICS.items()}
    assert {name: (unit, better) for name, unit, better in rows} == expected
    assert len(rows) == len(METRICS)


def test_one_metric_by_name_also_one_of_lm_eval_or_one_that_was_added(capsys, monkeypatch):
    monkeypatch.setitem(METRICS, "toy", Metric("toy metric", "toys", "higher"))
    names = ["serving_gap", "lm_eval_arc_easy_acc", "toy"]
    assert main(["metrics", *names, "--json"]) == 0
    facts = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert list(facts) == names
    assert facts["serving_gap"]["key"] == "evaluation.served"
    assert facts["lm_eval_arc_easy_acc"]["family"] == "Tasks of lm-eval"
    assert facts["toy"]["unit"] == "toys"
    assert facts["serving_gap"]["mlflow"] == "quality/serving_gap"
    assert main(["metrics", *names]) == 0
    printed = capsys.readouterr().out
    assert "toys" in printed
    assert "needle_loss" not in printed
