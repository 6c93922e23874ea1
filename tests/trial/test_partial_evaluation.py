"""An evaluation that is stopped or killed goes on where it was, with bitwise the same numbers."""

import json
import multiprocessing
import os
import random
import signal
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from kvlab.errors import WorkerKilled
from kvlab.evaluate import evaluate, forward_passes
from kvlab.evaluate import evaluation as evaluations
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.model import GPT
from kvlab.spec import load_sweep
from kvlab.store import Store, partial_results
from kvlab.store.provenance import Machine
from kvlab.sweep import plan
from kvlab.trial.run import run_task, stop_at_sigterm
from tests.support.hellaswag_items import ITEMS
from tests.support.random_model import random_model
from tests.support.tiny_sweep import EXPERIMENT, tiny_sweep_folder
from tests.support.tiny_training import experiment

TEXT = np.random.default_rng(3).integers(0, 257, 2000).astype(np.uint16)


def test_any_batches_that_are_kept_give_the_same_evaluation(monkeypatch):
    """Loss one-shot and served, positions and HellaSwag."""
    monkeypatch.setitem(forward_passes.PASS_TOKENS, "cpu", 192)
    monkeypatch.setitem(forward_passes.DECODE_ROWS, "cpu", 4)
    monkeypatch.setattr(evaluations, "load_hellaswag", lambda limit: ITEMS[:limit])
    evaluation = {"loss_tokens": 480, "served_tokens": 240, "positions": True, "hellaswag": 2}
    shape = {"vocab_size": 257, "block_size": 48, "n_layer": 1}
    of = experiment(
        shape, {"batch_tokens": 48}, serving={"kv_dtype": "int8"}, evaluation=evaluation
    )
    model, data = random_model(of.model), SimpleNamespace(validation=TEXT)
    kept = {}
    expected = evaluate(model, data, of, kept=kept)
    assert {name.partition(", pass")[0] for name in kept} == {
        "validation loss, served", "validation loss", "loss by position", "HellaSwag",
    }  # fmt: skip
    rng = random.Random(0)
    some = {name: arrays for name, arrays in kept.items() if rng.random() < 0.5}
    assert evaluate(model, data, of, kept=some) == expected
    assert some.keys() == kept.keys()
    monkeypatch.setattr(GPT, "hidden_states", lambda *_a, **_k: pytest.fail("computed again"))
    updates = []
    monkeypatch.setattr(evaluations, "REPORT_SECONDS", 0)
    assert evaluate(model, data, of, on_progress=updates.append, kept=kept) == expected
    ends = {update["note"]: update["step"] == update["steps"] for update in updates}
    assert all(ends.values()), "progress reaches its end"


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """One trial, a store in which it has run to its end, and one in which it is trained."""
    text = EXPERIMENT.replace("loss_tokens: 64", "loss_tokens: 256, positions: true")
    text = text.replace("tokens: 640", "tokens: 64")
    with tiny_sweep_folder(tmp_path_factory.mktemp("partial"), experiment=text) as folder:
        trial = plan(load_sweep("s.yaml")).trials[0].trial
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(forward_passes.PASS_TOKENS, "cpu", 64)
            patch.setitem(forward_passes.DECODE_ROWS, "cpu", 4)
            assert run_task(trial, folder / "whole") == "done"
            yield trial, folder, read_quality(Store(folder / "whole"), trial)


def read_quality(store, trial):
    result = store.result(trial.id)
    names = ("loss", "bits_per", "serving")
    numbers = {k: v for k, v in result["measurements"].items() if k.startswith(names)}
    return json.dumps([numbers, result["files"]])


def run_in_process(trial, path, number=None, batches=0, write_seconds=20.0):
    """Run the trial in a process, which gets a signal after some batches; return its exit code."""

    def work():
        compute = evaluations.EvaluationPart.keep
        counted = []

        def keep(part, one, all_batches):
            for arrays in compute(part, one, all_batches):
                counted.append(1)
                if len(counted) == batches and number is not None:
                    os.kill(os.getpid(), number)
                yield arrays

        evaluations.EvaluationPart.keep, evaluations.REPORT_SECONDS = keep, 0
        partial_results.WRITE_SECONDS = write_seconds
        with suppress(WorkerKilled), stop_at_sigterm():
            run_task(trial, path)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(120)
    return process.exitcode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_evaluation_goes_on_where_it_was(planned, number):
    """Killed twice. SIGTERM loses no batch that is done; SIGKILL those since the last file."""
    trial, folder, expected = planned
    store = Store(folder / number.name)
    partial = store.trial_directory(trial.id) / "partial"
    write_seconds = 20.0 if number == signal.SIGTERM else 0.0
    for deaths in (1, 2):
        code = run_in_process(trial, store.path, number, 3 + 2 * deaths, write_seconds)
        assert code == (0 if number == signal.SIGTERM else -number)
        assert store.result(trial.id) is None
        kept = [read_sealed_json(path)["batches"] for path in partial.glob("*.json")]
        counts = {signal.SIGTERM: 5 + 2 * (deaths - 1), signal.SIGKILL: 4 + 3 * (deaths - 1)}
        assert sum(map(len, kept)) >= counts[number]
    assert run_in_process(trial, store.path) == 0
    assert read_quality(store, trial) == expected
    log = (store.trial_directory(trial.id) / "attempts/3/log.txt").read_text()
    assert "evaluation goes on" in log
    assert not partial.exists(), "the result has it"


def change(path, edit):
    value = read_sealed_json(path)
    edit(value)
    write_sealed_json(path, value)


def halve_losses(value):
    """What other weights or code might have measured: whole, and of another identity."""
    value["identity"]["training"] = "0" * 64
    for arrays in value["batches"].values():
        for one in arrays.values():
            one["base64"] = "A" * len(one["base64"].rstrip("=")) + "=" * one["base64"].count("=")


def test_a_damaged_or_foreign_file_is_not_used(planned):
    """Several in turn, each in place of the one file of a stopped evaluation."""
    trial, folder, expected = planned
    store = Store(folder / "damaged")
    assert run_in_process(trial, store.path, signal.SIGTERM, 5) == 0
    partial = store.trial_directory(trial.id) / "partial"
    (path,) = partial.glob("*.json")
    whole = path.read_bytes()
    identity = dict(read_sealed_json(path)["identity"])
    for number, damage in enumerate([
        lambda: path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]),
        lambda: path.write_bytes(whole[:-40]),
        lambda: path.write_text("{}"),
        lambda: (path.unlink(), path.mkdir()),
        lambda: change(path, halve_losses),
        lambda: change(path, lambda v: v["identity"]["machine"].update(device="another")),
        lambda: change(path, lambda v: v["identity"].update(code="before an edit")),
        lambda: change(path, lambda v: v.update(batches={"a": {"b": {"dtype": "object"}}})),
        lambda: change(path, lambda v: next(iter(v["batches"].values()))["count"].update(shape=[7])),
    ]):  # fmt: skip
        path.write_bytes(whole)
        damage()
        logged, fence = [], SimpleNamespace(check=lambda: None)
        code = {name: value for name, value in identity.items() if name != "machine"}
        kept = partial_results.PartialResults(partial, code, logged.append, fence)
        with kept.open(Machine(**identity["machine"])):
            assert kept.get(next(iter(json.loads(whole)["batches"]))) is None, number
        assert [str(path) in line for line in logged] == [True], number
        assert not path.exists()
    path.write_bytes(whole)
    change(path, halve_losses)
    assert run_in_process(trial, store.path) == 0
    assert read_quality(store, trial) == expected
