"""`kvlab doctor`: what it finds, and what it says of what is missing."""

import builtins
import importlib.util
import json
import shutil
from itertools import repeat
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from kvlab.cli.main import main
from kvlab.errors import ResourceError
from kvlab.extensions.doctor import command


def test_doctor_reports_the_installation_and_leaves_no_files(tmp_path, monkeypatch, capsys):
    """Of Ray it starts a cluster and ends it, which tests/sweep/executors/test_ray.py does."""
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    asked, ended = [], SimpleNamespace(close=lambda: asked.append("end"))
    start = lambda name, run: asked.append((name, run(None))) or ended  # noqa: E731
    monkeypatch.setattr("kvlab.extensions.doctor.command.make_executor", start)
    assert main(["doctor", "--store", str(tmp_path / "runs"), "--json"]) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert {found[name]["state"] for name in ("torch", "ray", "store", "MLflow")} == {"ok"}
    assert found["text"]["state"] == "note"
    assert "kvlab data prepare" in found["text"]["way_out"]
    assert list(tmp_path.iterdir()) == []
    assert asked == [("ray", "done"), "end"]


@pytest.fixture
def _no_ray(monkeypatch):
    def refuse(name, run):  # noqa: ARG001 (those of make_executor)
        raise ResourceError("ray cannot be started: no room")

    monkeypatch.setattr("kvlab.extensions.doctor.command.make_executor", refuse)


@pytest.mark.usefixtures("_no_ray")
def test_doctor_finds_a_store_and_a_ray_that_cannot_be_used(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--store", str(tmp_path / "file" / "runs")]) == 1
    text = capsys.readouterr().out
    for words in ("WRONG", "--store or KVLAB_STORE", "no room", "--executor inline"):
        assert words in text


GPU = {
    "is_available": True, "device_count": 2, "mem_get_info": (70, 80),
    "get_device_properties": SimpleNamespace(name="toy"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "name", "state", "words"),
    [
        ({}, "GPU 1", "ok", "70 B of 80 B"),
        ({"mem_get_info": RuntimeError("device is busy\nat x")}, "GPU 1", "wrong", "is busy see"),
        ({"CC": "no-such-compiler"}, "compiler", "wrong", "install gcc"),
        ({"CC": "sh"}, "compiler", "ok", "Triton, with sh"),
        ({"triton": None}, "compiler", "wrong", "pip install triton"),
        ({"is_available": False}, "GPU", "wrong", "for CUDA 12.8 sees no GPU"),
        ({"is_available": False, "built": None}, "GPU", "wrong", "for CPU sees no GPU"),
        ({"is_available": False, "nvidia-smi": None}, "GPU", "note", "none visible"),
        ({"is_available": False, "nvidia-smi": None, "mps": True}, "GPU", "note", "Apple's"),
    ],
)
@pytest.mark.usefixtures("_no_ray")
def test_doctor_looks_at_what_a_gpu_needs(facts, name, state, words, monkeypatch, capsys):
    facts = {**GPU, "nvidia-smi": "", "CC": "sh", "triton": "", "built": "12.8", **facts}
    for key in GPU:
        monkeypatch.setattr(torch.cuda, key, Mock(side_effect=repeat(facts[key])))
    monkeypatch.setattr(torch.version, "cuda", facts["built"])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: facts.get("mps", False))
    for module, name_of, known in (
        (shutil, "which", "nvidia-smi"),
        (importlib.util, "find_spec", "triton"),
    ):
        real = getattr(module, name_of)
        monkeypatch.setattr(
            module, name_of, lambda n, k=known, r=real: facts[k] if n == k else r(n)
        )
    monkeypatch.setenv("CC", facts["CC"])
    assert main(["doctor", "--json"]) == 1, "Ray does not start"
    check = {check["name"]: check for check in json.loads(capsys.readouterr().out)}[name]
    assert check["state"] == state
    assert words in f"{check['found']} {check['way_out']}"


def test_doctor_goes_on_where_torch_cannot_be_loaded(monkeypatch):
    real = builtins.__import__

    def load(name, *arguments, **keywords):
        if name == "torch":
            raise OSError("libcudart.so.12: cannot open shared object file")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", load)
    [check] = command._check_torch()
    assert (check.state, "libcudart" in check.found) == ("wrong", True)
