"""`plan`, `submit` and the commands beside them after an edit of the code."""

import json

import pytest

from kvlab.analysis.study import Study
from kvlab.store import Store
from tests.support.code_versions import running_code
from tests.support.tiny_sweep import SHORT_REPORT, SWEEP, run_kvlab, tiny_sweep_folder

SUBMIT = ("submit", "s.yaml", "--executor", "inline")
ONE_LEVEL = SWEEP.replace("    mqa: {model.n_kv_head: 1}\n", "    mha2: {model.n_head: 1}\n")
REPORT = SHORT_REPORT.replace("failures", "failures, provenance")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two of three trials, done with the code ``t1``."""
    with tiny_sweep_folder(tmp_path_factory.mktemp("code"), ONE_LEVEL + REPORT) as folder:
        with running_code("t1"):
            assert run_kvlab(*SUBMIT)[0] == 0
        yield folder


def test_after_an_edit(folder):
    """One story: looked at, left as it is, stopped, mixed, and at last run again."""
    store, path = Store(folder / "runs"), folder / "s.yaml"
    report = folder / "reports" / "s" / "report.md"
    first = report.read_text()
    assert "Mixed code" not in first
    with running_code("t1"):
        assert run_kvlab("plan", "s.yaml")[1].count("other code") == 0
        assert "code:" not in run_kvlab("status", "s")[1]
    with running_code("t2"):
        out = run_kvlab("plan", "s.yaml")[1]
        assert out.count("done, other code") == 2
        facts = json.loads(run_kvlab("plan", "s.yaml", "--json")[1])
        assert [one["code"] for one in facts["trials"]] == ["other", "other"]
        assert [one["state"] for one in facts["trials"]] == ["done", "done"]
        assert (len(facts["code"]["others"]), facts["code"]["is_mixing"]) == (2, False)
        assert "code: 2 trials ran other code than this" in run_kvlab("status", "s")[1]
        assert json.loads(run_kvlab("status", "s", "--json")[1])["other_code"] == 2
        assert "2 trials ran other code than this" in run_kvlab("verify", "s")[1]
        # nothing is missing: it says so, and the report is as before
        code, out, _ = run_kvlab(*SUBMIT)
        assert code == 0
        assert "nothing is missing" in out
        assert report.read_text() == first

        path.write_text(SWEEP + "    mha2: {model.n_head: 1}\n" + REPORT)
        assert json.loads(run_kvlab("plan", "s.yaml", "--json")[1])["code"]["is_mixing"]
        code, out, error = run_kvlab(*SUBMIT)
        assert (code, error.startswith("--code is not given: ")) == (2, True)
        assert len(store.trial_ids()) == 2, "nothing has begun"

        code, out, _ = run_kvlab(*SUBMIT, "--code", "mix", "--json")
        assert (code, json.loads(out)["states"]["done"]) == (0, 3)
        text = report.read_text()
        assert "**Mixed code:** 1 of 3 trials, in mqa, ran other code" in text
        assert "Mixed record" not in text
        [other] = Study.load(store, "s").other_code
        assert (other.code, other.levels) == (("t2", "m1"), ("mqa",))
        assert store.result(other.trial)["provenance"]["code"] == {
            "training": ["t2"], "measurement": "m1",
        }  # fmt: skip

        before = {trial: store.result_seal(trial) for trial in store.trial_ids()}
        code, out, _ = run_kvlab(*SUBMIT, "--code", "rerun")
        assert code == 0
        assert store.result_seal(other.trial) == before[other.trial], "it is of this code"
        for trial in before.keys() - {other.trial}:
            kept = store.attempt_directory(trial, 1) / "result.json"
            assert before[trial] in kept.read_text()
            assert store.code(trial) == {"training": ["t2"], "measurement": "m1"}
        assert "Mixed code" not in report.read_text()
        code, out, _ = run_kvlab(*SUBMIT, "--code", "rerun")
        assert (code, "run again" in out, "nothing is missing" in out) == (0, False, True)
