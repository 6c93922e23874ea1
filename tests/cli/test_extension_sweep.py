"""A sweep whose experiment has extensions, from its submission to its report and its models.

`tests.studies.chaos` kills drivers and workers of such a one.
"""

import json
import shutil
from pathlib import Path

import pytest

from kvlab.spec import extension_files
from tests.support.extensions import needs
from tests.support.tiny_sweep import EXPERIMENT, run_kvlab, tiny_sweep_folder

EXAMPLES = Path(__file__).parents[2] / "docs" / "extend"
FILES = ("half_values.py", "decayed_sum.py", "top_five.py", "sums.py")
OWN = (
    EXPERIMENT.replace("model:", f"extensions: [{', '.join(FILES)}]\nmodel:")
    .replace("source: files", "source: sums, options: {largest: 40}")
    .replace("paths: [texts], ", "")
)
SWEEP = """\
question: What does it cost?
experiment: e.yaml
factors:
  attention:
    plain: {}
    half: {model.kv: half_values}
    mixed: {model.attention_pattern: MG, model.kinds: {M: {mixer: decayed_sum}}}
decide: {metric: top_five_served}
"""
REPORT = "report: {sections: [answer, cells, extensions, failures]}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with tiny_sweep_folder(tmp_path_factory.mktemp("own"), SWEEP + REPORT, OWN) as folder:
        for name in FILES:
            shutil.copy(EXAMPLES / name, folder)
        code, out, err = run_kvlab("submit", "s.yaml", "--executor", "inline")
        assert code == 0, out + err
        yield folder


def test_every_result_has_the_text_and_its_bytes(folder):
    results = [json.loads(p.read_text()) for p in (folder / "runs").rglob("trials/*/result.json")]
    assert {one["status"] for one in results} == {"done"}
    texts = {name: (folder / name).read_text() for name in FILES}
    assert all(one["experiment"]["extensions"] == texts for one in results)
    sizes = {
        (one["model"]["kv"] if "kv" in one["model"] else one["experiment"]["model"]["kv"],
         one["experiment"]["model"]["attention_pattern"]): one["kv"]["bytes_at_block_size"]
        for one in results
    }  # fmt: skip
    assert sizes["half_values", "G"] == 0.75 * sizes["separate", "G"]
    assert sizes["separate", "MG"] == sizes["separate", "G"] / 2 + 2 * 4 * 4  # a state of 2 heads


@needs("generate")
def test_a_report_runs_no_code_and_a_model_runs_what_was_run_here_before(folder, monkeypatch):
    trial = next((folder / "runs" / "trials").iterdir()).name
    monkeypatch.setattr(extension_files, "_loaded", {})
    monkeypatch.setattr(extension_files, "_trusted", set())
    assert run_kvlab("report", "s")[0] == 0
    report = (folder / "reports" / "s" / "report.md").read_text()
    assert "right token among the five likeliest, served (%)" in report
    assert "Metrics of extensions" in report
    assert run_kvlab("status", "s")[0] == 0
    assert not extension_files._loaded
    data = folder / "elsewhere"  # another machine
    with monkeypatch.context() as patch:
        patch.setenv("KVLAB_DATA", str(data))
        code, _, err = run_kvlab("generate", trial, "--prompt", "the", "--new-tokens", "4")
        assert code == 2
        assert "half_values.py, code of its record that was never run on this machine" in err
        assert not extension_files._loaded
    code, _, err = run_kvlab("generate", trial, "--prompt", "the", "--new-tokens", "4")
    assert code == 0, err
