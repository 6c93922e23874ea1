"""The preparation: smoke tests with real steps of tiny models, and datasets."""

import json
from dataclasses import asdict, replace

import pytest

from kvlab.errors import DataError, StoreError
from kvlab.fs.atomic_files import write_json
from kvlab.layout.gpu_sharing import device_share, trials_per_device
from kvlab.spec import load_sweep
from kvlab.store.provenance import Origin
from kvlab.sweep import Driver, plan
from kvlab.sweep.driver.preparation import (
    MAX_TRAINING_FLOPS,
    SmokeTests,
    estimate_training_seconds,
    prefetch_evaluation_sets,
    smoke_test_key,
)
from kvlab.sweep.executors.executor import EndedTask
from kvlab.sweep.executors.inline import InlineExecutor
from kvlab.trial.smoke_test import SmokeResult, SmokeTest, run_smoke_test
from tests.support.stub_trials import EXPERIMENT, StubRun, identify, tiny_plan, write_sweep
from tests.support.tiny_sweep import write_tiny_sweep


def cuda():
    import torch

    return torch.cuda.is_available()


class Run:
    """Run smoke tests for real, and trials with the stub."""

    def __init__(self, store):
        self.stub, self.seen = StubRun(store.path), []

    def __call__(self, trial):
        self.seen.append(trial)
        return run_smoke_test(trial) if isinstance(trial, SmokeTest) else self.stub(trial)


class MqaIsBroken(Run):
    """Smoke tests of multi-query attention ask for a GPU, which is not there."""

    def __call__(self, trial):
        experiment = trial.experiment
        if isinstance(trial, SmokeTest) and experiment.model.n_kv_head == 1:
            wrong = experiment.resources.model_copy(update={"gpus": 1.0})
            trial = replace(trial, experiment=experiment.model_copy(update={"resources": wrong}))
        return super().__call__(trial)


def smoke(store, executor, **options):
    said = []
    return SmokeTests(store, "s", executor, Origin(), said.append, **options), said


def test_every_architecture_is_tested_once_and_the_baseline_first(tmp_path, store):
    planned = list(tiny_plan(tmp_path).trials)
    run = Run(store)
    test, said = smoke(store, InlineExecutor(run), requested=True)
    assert test(planned, lambda: None) == planned
    assert len(run.seen) == 4  # 2 heads x 2 servings, whatever the seeds
    assert run.seen[0].id == f"smoke-{planned[0].trial.id}"
    assert said[0] == "smoke test: one step of 4 architectures"
    assert said[1].startswith("smoke test: none broken")
    assert not list(store.path.rglob("*.json")), "nothing is recorded of what works"


def test_trials_of_a_broken_architecture_fail_at_once_and_the_others_go_on(
    tmp_path, store, planned
):
    run, results = MqaIsBroken(store), []
    executor = InlineExecutor(run)
    test, said = smoke(store, executor, requested=True)
    summary = Driver(planned, store, executor, prepare=test, on_result=results.append).run()
    assert summary.states == {"done": 4, "failed": 4, "missing": 0}
    assert summary.halt_reason == ""
    assert "2 broken" in said[1]
    assert sorted(results) == sorted(one.trial.id for one in planned.trials)
    for one in planned.trials:
        result = store.result(one.trial.id)
        if one.levels["heads"] == "mha":
            assert result["status"] == "done"
            continue
        error = result["error"]
        assert (error["class"], error["type"]) == ("resources", "ResourceError")
        assert "in the smoke test: resources.gpus = 1, and no CUDA" in error["message"]
        trace = store.trial_directory(one.trial.id) / error["traceback"]
        assert "no CUDA device is visible" in trace.read_text()
    tested = [trial for trial in run.seen if isinstance(trial, SmokeTest)]
    assert run.seen[: len(tested)] == tested, "before the long work"
    # broken ones are tested again when they are asked for again
    again = plan(load_sweep(tmp_path / "s.yaml"), store, identify=identify)
    test, said = smoke(store, executor, requested=True)
    summary = Driver(again, store, executor, prepare=test, retry_failed=True).run()
    assert (summary.trials_run, summary.states["failed"]) == (4, 4)


def test_it_pays_where_trainings_are_long_by_the_measured_rate_or_the_fastest_device(
    tmp_path, store
):
    planned = list(tiny_plan(tmp_path).trials)
    flops = planned[0].flops
    assert estimate_training_seconds(planned[0], None) == flops / MAX_TRAINING_FLOPS["cpu"]
    assert MAX_TRAINING_FLOPS["gpu"] > 4.5e14, "an H200 was measured to do that"
    for rate, tests in ((None, 0), (flops / 299, 0), (flops / 301, 4)):
        run = Run(store)
        smoke(store, InlineExecutor(run), flops_per_second=rate)[0](planned, lambda: None)
        assert len(run.seen) == tests
    long = [replace(one, flops=10**15) for one in planned]
    run = Run(store)
    smoke(store, InlineExecutor(run))[0](long, lambda: None)
    assert len(run.seen) == 4
    one_architecture = [one for one in long if smoke_test_key(one) == smoke_test_key(long[0])]
    smoke(store, InlineExecutor(run))[0](one_architecture, lambda: None)
    smoke(store, InlineExecutor(run), requested=False)[0](long, lambda: None)
    assert len(run.seen) == 4, "the first trial shows it as soon; and it was not wanted"


def test_a_step_has_the_trials_microbatch_and_tells_its_memory(tmp_path):
    text = EXPERIMENT.replace("batch_tokens: 16}", "batch_tokens: 4096}").replace("320", "8192")
    text = text.replace("vocab_size: 257", "vocab_size: 50000").replace("n_embd: 8", "n_embd: 64")
    write_sweep(tmp_path)
    (tmp_path / "e.yaml").write_text(f"{text}resources: {{microbatch_tokens: 32}}\n")
    planned = plan(load_sweep(tmp_path / "s.yaml"), identify=identify)
    answer = tmp_path / "answer.json"
    assert run_smoke_test(SmokeTest.of(planned.trials[0].trial, answer)) == "done"
    result = json.loads(answer.read_text())
    assert (result["microbatch_tokens"], result["failure"]) == (32, None)
    # at the least weights, gradients and AdamW's two moments, of 4 bytes each
    assert result["peak_bytes"] > 0.9 * 16 * planned.trials[0].parameters


class Ends(InlineExecutor):
    """An executor whose tasks all end with one error, or report 5 GB of 80 for 16 tokens a pass."""

    def __init__(self, error=None):
        super().__init__(None)
        self.error = error

    def wait(self, seconds):  # noqa: ARG002
        trial, self._task = self._task, None
        if trial is None:
            return []
        if self.error is None:
            write_json(trial.result_path, asdict(SmokeResult(5 * 10**9, 80 * 10**9, 16)))
        return [EndedTask(trial.id, outcome=None if self.error else "done", error=self.error)]


def test_memory_and_deaths_are_left_to_the_trials_own_policies(tmp_path, store):
    planned = list(tiny_plan(tmp_path).trials)
    for error in (MemoryError("none left"), RuntimeError("its process died")):
        test, said = smoke(store, Ends(error), requested=True)
        assert test(planned, lambda: None) == planned
        assert said[-1] == "smoke test: none broken"
    assert store.trial_ids() == []
    with pytest.raises(StoreError, match="no room"):
        smoke(store, Ends(StoreError("no room")), requested=True)[0](planned, lambda: None)


def packed(tmp_path, gpus="auto"):
    write_sweep(tmp_path)
    (tmp_path / "e.yaml").write_text(f"{EXPERIMENT}resources: {{gpus: {gpus}}}\n")
    return plan(load_sweep(tmp_path / "s.yaml"), identify=identify)


def test_gpus_auto_is_settled_by_the_measured_memory(tmp_path, store):
    planned = list(packed(tmp_path).trials)
    # also where the tests were not wanted: what is shared must be known
    settled = smoke(store, Ends(), requested=False)[0](planned, lambda: None)
    for before, after in zip(planned, settled, strict=True):
        assert before.trial.experiment.resources.devices == 1
        resources = after.trial.experiment.resources
        assert resources.gpus == device_share(trials_per_device(5 * 10**9, 80 * 10**9)) == 0.0833
        assert (resources.microbatch_tokens, resources.shares_gpu) == (16, True)
        assert after.trial.id == before.trial.id
    # nothing measured: a GPU of its own
    test, _ = smoke(store, Ends(RuntimeError("died")), requested=False)
    assert {p.trial.experiment.resources.gpus for p in test(planned, lambda: None)} == {1.0}
    fixed = list(packed(tmp_path, 0.25).trials)
    assert smoke(store, Ends(), requested=False)[0](fixed, lambda: None) == fixed


@pytest.mark.gpu
@pytest.mark.skipif(not cuda(), reason="needs a CUDA device")
def test_on_a_gpu_the_peak_is_the_allocators(tmp_path):
    import torch

    planned = packed(tmp_path)
    answer = tmp_path / "answer.json"
    assert run_smoke_test(SmokeTest.of(planned.trials[0].trial, answer)) == "done"
    result = json.loads(answer.read_text())
    assert result["device_bytes"] == torch.cuda.get_device_properties(0).total_memory
    assert 2**20 < result["peak_bytes"] < 2**32


def test_hellaswag_is_had_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    folder = tmp_path
    (folder / "data").mkdir()
    (folder / "data" / "hellaswag_val.jsonl").write_text("not the set")
    path = write_tiny_sweep(folder)
    prefetch_evaluation_sets(plan(load_sweep(path)).trials, print)
    experiment = folder / "e.yaml"
    experiment.write_text(experiment.read_text().replace("loss_tokens: 64", "hellaswag: 5"))
    with pytest.raises(DataError, match="is not HellaSwag"):
        prefetch_evaluation_sets(plan(load_sweep(path)).trials, print)
