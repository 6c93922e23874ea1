"""`make gpu`, on CPU and with tiny models: its checks run, and its page says what was tried."""

import subprocess
import sys

from tests import gpu_page


def test_the_page_has_a_line_for_every_claim(tmp_path, monkeypatch):
    """A check that fails is a claim not held, and what is not here is not measured."""

    def fail(_setting):
        yield gpu_page.Claim("half of it", True, "1 | 2")
        raise RuntimeError("no memory\nleft")

    monkeypatch.setitem(gpu_page.CHECKS, "limit", fail)
    page = tmp_path / "page.md"
    names = ["fuzzer", "decoders", "training", "limit", "packing", "nccl"]
    code = gpu_page.main(
        ["--device", "cpu", "--tiny", "--only", *names, "--out", str(page)]
    )  # fmt: skip
    assert code == 1
    lines = page.read_text().splitlines()
    assert any("tiny" in line for line in lines)
    rows = [line for line in lines if line.startswith("| ")][1:]
    states = {row.split(" | ")[0]: row.split(" | ")[1] for row in rows}
    assert states["| models and caches compute what the reference does"] == "held"
    assert sum(key.startswith("| the captured step") for key in states) == len(gpu_page.DECODED)
    assert all(state == "held" for key, state in states.items() if "captured step" in key)
    assert states["| the check `limit` runs to its end"] == "NOT HELD"
    assert states["| two processes train together over NCCL"] == "not measured"
    assert any("1 / 2" in row for row in rows)
    assert any("no memory" in row and "left" not in row for row in rows)


def test_the_sweep_that_does_not_fit_a_device_has_text_enough(tmp_path):
    """It plans, with the sizes of `tests/test_cuda.py`."""
    sweep = gpu_page.SmallSweep(tmp_path, "cpus: 1, microbatch_tokens: 131072")
    sweep.write(width=256, block=256, batch=131_072, tokens=262_144)
    command = [sys.executable, "-m", "kvlab", "plan", "s.yaml"]
    done = subprocess.run(command, **sweep.options, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 trials" in done.stdout


def test_without_a_device_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_page.main([]) == 2
    assert "kvlab doctor" in capsys.readouterr().out
