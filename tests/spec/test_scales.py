"""`scales`: one file at several sizes, and problems placed at the scale that causes them."""

import json

import pytest

from kvlab.cli.main import main
from kvlab.errors import SpecError
from kvlab.spec import load_sweep
from tests.support.spec_files import EXPERIMENT, write_spec

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


def test_a_scale_replaces_levels_and_keys_and_is_named_after_both(tmp_path, capsys):
    sweep = load(tmp_path, SWEEP + SCALES, "wide")
    assert (sweep.name, sweep.seeds, sweep.source.scale) == ("s-wide", (0, 1, 2), "wide")
    cells = {tuple(cell.levels.values()): cell.experiment.model for cell in sweep.cells()}
    assert {model.n_embd for model in cells.values()} == {128}
    assert cells["mqa", "hybrid"].n_kv_head == 1
    assert cells["mha", "hybrid"].window == 32
    assert cells["mha", "global"].window is None

    command = ["plan", str(tmp_path / "s.yaml"), "--json", "--rate", "1e9", "--scale", "wide"]
    assert main([*command, "--store", str(tmp_path / "runs")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["sweep"], len(facts["trials"])) == ("s-wide", 4 * 3)
    plain, own = load(tmp_path, SWEEP), load(tmp_path, SWEEP + SCALES)
    assert (plain.name, plain.seeds) == (own.name, own.seeds) == ("s", (0, 1))
    assert [cell.experiment for cell in plain.cells()] == [cell.experiment for cell in own.cells()]


def test_a_problem_is_placed_at_the_scale_that_causes_it(tmp_path):
    text = SWEEP + SCALES.replace("GLL", "GXX")
    load(tmp_path, text)  # the file's own scale has no such problem
    assert scale_errors(tmp_path, text, "wide").startswith("s.yaml:14:")
    missing = scale_errors(tmp_path, SWEEP + SCALES.replace("wide.yaml", "no.yaml"), "wide")
    assert missing.startswith("s.yaml:13:17: experiment = no.yaml cannot be read")
    key = SCALES.replace("hybrid: {model.window", "hybrid: {window")
    assert scale_errors(tmp_path, SWEEP + key, "wide").startswith("s.yaml:14:34: factors.horizon")
    of_the_file = SWEEP.replace("n_kv_head: 1", "n_kv_head: 3") + SCALES
    assert scale_errors(tmp_path, of_the_file, "wide").startswith("s.yaml:6:")
