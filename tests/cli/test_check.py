"""`kvlab check`: what holds of a user's file, a counterexample of what does not."""

import json
from pathlib import Path

import pytest

from kvlab.trial.member_checks import CHECKS
from tests.support.tiny_sweep import run_kvlab

EXAMPLE = Path(__file__).parents[2] / "docs" / "extend" / "half_values.py"


@pytest.mark.parametrize("name", ["half_values", "decayed_sum"])
def test_the_examples_of_the_page_hold(name):
    code, out, _ = run_kvlab("check", EXAMPLE.with_stem(name), "--cases", "12", "--json")
    found = json.loads(out)
    assert (code, [one["check"] for one in found]) == (0, [*CHECKS])
    assert not any(one["counterexample"] for one in found)
    by_check = {one["check"]: one["largest"] for one in found}
    assert max(by_check.values()) < 1e-10
    assert by_check["a cache takes the declared bytes"] > 0, "its chunks were compared"


def test_each_mistake_has_a_counterexample(tmp_path):
    mistakes = {
        "self.up(decode_stored(v, q.dtype))": "self.up(decode_stored(v, q.dtype)) / k.shape[2]",
        "return layer.head_dim * layer.head_dim // 2": "return 7",
        "decode_stored(v, q.dtype)": "decode_stored(v, q.dtype).detach()",
    }
    failed = []
    for number, (right, wrong) in enumerate(mistakes.items()):
        path = tmp_path / f"m{number}.py"
        assert EXAMPLE.read_text().count(right) == 1
        path.write_text(EXAMPLE.read_text().replace(right, wrong))
        code, out, _ = run_kvlab("check", str(path), "--cases", "8")
        assert code == 1
        failed.append([line.split("  ")[2] for line in out.splitlines() if "DOES NOT HOLD" in line])
        assert '    with {"model": {"vocab_size"' in out
    assert [one[0].rpartition(" (")[0] for one in failed] == [
        "cached logits equal those of one pass", "parameters are as declared",
        "gradients reach every weight",
    ]  # fmt: skip


def test_a_file_that_fails_has_its_line(tmp_path):
    path = tmp_path / "f.py"
    path.write_text(EXAMPLE.read_text().replace("decode_stored(v", "decode_stored(w"))
    code, out, _ = run_kvlab("check", str(path), "--cases", "2")
    assert code == 1
    assert "f.py:29: NameError: name 'w' is not defined" in out
    code, _, err = run_kvlab("check", str(tmp_path / "none.py"))
    assert (code, err.count("cannot be read")) == (2, 1)
    assert run_kvlab("check", str(EXAMPLE), "--cases", "0")[0] == 2
