"""`scales`: one file at several sizes, and problems placed at the scale that causes them."""

import json

import pytest

from kvlab.cli.main import main
from kvlab.errors import SpecError
from kvlab.spec import load_sweep
from tests.support.spec_files import EXPERIMENT, sweep_errors, write_spec

SWEEP = """\
question: What does it cost?
experiment: e.yaml
factors:
  heads:
    mha: {}
    mqa: {model.n_kv_head: 1}
  horizon:
    global: {}
    hybrid: {model.window: 8, model.attention_pattern: GL}
seeds: [0, 1]
"""

SCALES = """\
scales:
  wide:
    experiment: wide.yaml
    factors: {horizon: {hybrid: {model.window: 32, model.attention_pattern: GLL}}}
    seeds: 3
"""


def load(folder, text, scale=""):
    write_spec(folder, EXPERIMENT)
    write_spec(folder, EXPERIMENT.replace("n_embd: 64", "n_embd: 128"), "wide.yaml")
    return load_sweep(write_spec(folder, text, "s.yaml"), scale)


def scale_errors(folder, text, scale):
    with pytest.raises(SpecError) as caught:
        load(folder, text, scale)
    return str(caught.value).replace(f"{folder}/", "")


def test_a_scale_replaces_levels_and_keys_and_is_named_after_both(tmp_path):
    sweep = load(tmp_path, SWEEP + SCALES, "wide")
    assert (sweep.name, sweep.seeds, sweep.source.scale) == ("s-wide", (0, 1, 2), "wide")
    cells = {tuple(cell.levels.values()): cell.experiment.model for cell in sweep.cells()}
    assert {model.n_embd for model in cells.values()} == {128}
    assert cells["mqa", "hybrid"].n_kv_head == 1
    assert cells["mha", "hybrid"].window == 32
    assert cells["mha", "global"].window is None


def test_the_plan_of_a_scale_is_a_sweep_of_its_own(tmp_path, capsys):
    load(tmp_path, SWEEP + SCALES)
    command = ["plan", str(tmp_path / "s.yaml"), "--json", "--rate", "1e9", "--store"]
    names, sizes = [], []
    for scale in ([], ["--scale", "wide"]):
        assert main([*command, str(tmp_path / "runs"), *scale]) == 0
        facts = json.loads(capsys.readouterr().out)
        names.append(facts["sweep"])
        sizes.append(len(facts["trials"]))
    assert names == ["s", "s-wide"]
    assert sizes == [4 * 2, 4 * 3]


def test_without_a_scale_the_file_is_what_it_was(tmp_path):
    plain, scaled = load(tmp_path, SWEEP), load(tmp_path, SWEEP + SCALES)
    assert (plain.name, plain.seeds) == (scaled.name, scaled.seeds) == ("s", (0, 1))
    assert [cell.experiment for cell in plain.cells()] == [
        cell.experiment for cell in scaled.cells()
    ]


def test_a_problem_is_placed_at_the_scale_that_causes_it(tmp_path):
    text = SWEEP + SCALES.replace("GLL", "GXX")
    load(tmp_path, text)  # the file's own scale has no such problem
    assert scale_errors(tmp_path, text, "wide").startswith("s.yaml:14:")
    missing = scale_errors(tmp_path, SWEEP + SCALES.replace("wide.yaml", "no.yaml"), "wide")
    assert missing.startswith("s.yaml:13:17: experiment = no.yaml cannot be read")
    of_the_file = SWEEP.replace("n_kv_head: 1", "n_kv_head: 3") + SCALES
    assert scale_errors(tmp_path, of_the_file, "wide").startswith("s.yaml:6:")


@pytest.mark.parametrize(
    ("scale", "problem"),
    [
        ("{}", "scales.wide = {...} changes nothing; write what differs, one of experiment"),
        (
            "{seds: 3}",
            "s.yaml:12:16: scales.wide.seds = 3 is no key of a scale; did you mean seeds?",
        ),
        ("{seeds: [a]}", "s.yaml:12:18: seeds.0 = a is not a whole number"),
        ("{factors: [heads]}", "is not a mapping; write levels by factor"),
        ("{factors: {heads: mqa}}", "is not a mapping; write what a level changes by level"),
        ("{factors: {head: {}}}", "is not a factor of the sweep; use one of heads, horizon"),
        ("{factors: {heads: {gqa: {}}}}", "is not a level of heads; use one of mha, mqa"),
        (
            "{search: {choices: {model.n_kv_head: [1, 2]}, objectives: [loss], trials: 3}}",
            "cannot stand in place of the factors of the sweep",
        ),
    ],
)
def test_a_scale_that_does_not_fit_the_sweep_is_refused_without_being_used(
    tmp_path, scale, problem
):
    assert problem in sweep_errors(tmp_path, f"{SWEEP}scales:\n  wide: {scale}\n")


def test_an_unknown_scale_says_which_there_are(tmp_path):
    assert scale_errors(tmp_path, SWEEP + SCALES, "wid") == (
        "s.yaml:12:3: has no scale wid; use wide, or leave out --scale for the file's own"
    )
    assert "write `scales: {wide: {experiment: ...}}`" in scale_errors(tmp_path, SWEEP, "wide")
