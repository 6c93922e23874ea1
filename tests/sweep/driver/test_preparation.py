"""The preparation: smoke tests with real steps of tiny models, datasets, and a store that all share.

Machines of a cluster are other folders here.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvlab.errors import DataError, UsageError
from kvlab.layout.gpu_sharing import device_share, trials_per_device
from kvlab.spec import load_sweep
from kvlab.store.provenance import Origin
from kvlab.sweep import Driver, plan
from kvlab.sweep.driver import preparation
from kvlab.sweep.driver.preparation import (
    MAX_TRAINING_FLOPS,
    check_store_is_shared,
    estimate_training_seconds,
    prefetch_evaluation_sets,
    run_smoke_tests,
    smoke_test_key,
)
from kvlab.sweep.executors.executor import EndedTask
from kvlab.sweep.executors.inline import InlineExecutor
from kvlab.train.mfu import DATASHEET_FLOPS
from kvlab.trial.smoke_test import SmokeResult, SmokeTest, run_smoke_test
from tests.support.stub_trials import EXPERIMENT, StubRun, identify, tiny_plan, write_sweep
from tests.support.tiny_sweep import write_tiny_sweep


class Run:
    """Run smoke tests for real, and trials with the stub.

    Args:
        broken: Smoke tests of multi-query attention ask for a GPU, which is not there.
    """

    def __init__(self, store, *, broken=False):
        self.stub, self.broken, self.seen = StubRun(store.path), broken, []

    def __call__(self, trial):
        self.seen.append(trial)
        if not isinstance(trial, SmokeTest):
            return self.stub(trial)
        experiment = trial.experiment
        if self.broken and experiment.model.n_kv_head == 1:
            wrong = experiment.resources.model_copy(update={"gpus": 1.0})
            trial = replace(trial, experiment=experiment.model_copy(update={"resources": wrong}))
        return run_smoke_test(trial)


def smoke(store, executor, **options):
    """Return what tests missing trials, and the lines that it says."""
    said, options = [], {"requested": None, "flops_per_second": None, **options}

    def test(missing, check_stop):
        return run_smoke_tests(
            missing, check_stop, store, executor, Origin(), said.append, **options
        )

    return test, said


def test_every_architecture_is_tested_once_and_the_baseline_first(store, planned):
    run, trials = Run(store), list(planned.trials)
    test, said = smoke(store, InlineExecutor(run), requested=True)
    assert test(trials, lambda: None) == trials
    assert len(run.seen) == 4  # 2 heads x 2 servings, whatever the seeds
    assert run.seen[0].id == f"smoke-{trials[0].trial.id}"
    assert said[0] == "smoke test: one step of 4 architectures"
    assert said[1].startswith("smoke test: none broken")
    assert not list(store.path.rglob("*.json")), "nothing is recorded of what works"


def changed(planned, **sections):
    experiment = planned.trial.experiment
    for name, values in sections.items():
        section = getattr(experiment, name).model_copy(update=values)
        experiment = experiment.model_copy(update={name: section})
    return replace(planned, trial=replace(planned.trial, experiment=experiment))


def test_cells_of_one_architecture_share_a_test_which_compiles_nothing(planned):
    one = planned.trials[0]
    others = [
        changed(one, training={"compile": True}),
        changed(one, training={"batch_tokens": 32, "learning_rate": 1e-2}),
        changed(one, resources={"cpus": 4.0, "workers": 2}),
    ]
    assert {smoke_test_key(other) for other in others} == {smoke_test_key(one)}
    compiled = changed(others[0], serving={"compile": True})
    test = SmokeTest.of(compiled.trial).experiment
    assert (test.training.compile, test.serving.compile) == (False, False)
    # where the memory decides how many share a GPU, it is that of what will run
    packed = [changed(each, resources={"gpus": "auto"}) for each in (one, *others)]
    assert len(set(map(smoke_test_key, packed))) == 4
    assert SmokeTest.of(packed[1].trial).experiment.training.compile


def test_trials_of_a_broken_architecture_fail_at_once_and_the_others_go_on(
    tmp_path, store, planned
):
    run, results = Run(store, broken=True), []
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
    again, test = tiny_plan(tmp_path, store), smoke(store, executor, requested=True)[0]
    summary = Driver(again, store, executor, prepare=test, retry_failed=True).run()
    assert (summary.trials_run, summary.states["failed"]) == (4, 4)


def test_it_pays_where_trainings_are_long_by_the_measured_rate_or_the_fastest_device(
    store, planned
):
    trials = list(planned.trials)
    flops = trials[0].flops
    assert estimate_training_seconds(trials[0], None) == flops / MAX_TRAINING_FLOPS["cpu"]
    assert MAX_TRAINING_FLOPS["gpu"] > max(DATASHEET_FLOPS.values()), "it is a lower bound"
    long = [replace(one, flops=10**15) for one in trials]
    alone = [one for one in long if smoke_test_key(one) == smoke_test_key(long[0])]
    for missing, options, tests in (
        (trials, {}, 0),
        (trials, {"flops_per_second": flops / 299}, 0),
        (trials, {"flops_per_second": flops / 301}, 4),
        (long, {}, 4),
        (alone, {}, 0),  # its first trial shows it as soon
        (long, {"requested": False}, 0),
    ):
        run = Run(store)
        smoke(store, InlineExecutor(run), **options)[0](missing, lambda: None)
        assert len(run.seen) == tests, options


def test_a_step_has_the_trials_microbatch_and_tells_its_memory(tmp_path):
    text = EXPERIMENT.replace("batch_tokens: 16}", "batch_tokens: 4096}").replace("320", "8192")
    text = text.replace("vocab_size: 257", "vocab_size: 50000").replace("n_embd: 8", "n_embd: 64")
    [first, *_] = packed(tmp_path, f"{text}resources: {{microbatch_tokens: 32}}\n")
    result = run_smoke_test(SmokeTest.of(first.trial))
    assert (result.microbatch_tokens, result.failure) == (32, None)
    # at the least weights, gradients and AdamW's two moments, of 4 bytes each
    assert result.peak_bytes > 0.9 * 16 * first.parameters


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
            return [EndedTask(trial.id, outcome=SmokeResult(5 * 10**9, 80 * 10**9, 16))]
        return [EndedTask(trial.id, error=self.error)]


def test_memory_and_deaths_are_left_to_the_trials_own_policies(store, planned):
    trials = list(planned.trials)
    for error in (MemoryError("none left"), RuntimeError("its process died")):
        test, said = smoke(store, Ends(error), requested=True)
        assert test(trials, lambda: None) == trials
        assert said[-1] == "smoke test: none broken"
    assert store.trial_ids() == []


def packed(folder, experiment=f"{EXPERIMENT}resources: {{gpus: auto}}\n"):
    write_sweep(folder)
    (folder / "e.yaml").write_text(experiment)
    return list(plan(load_sweep(folder / "s.yaml"), identify=identify).trials)


def test_gpus_auto_is_settled_by_the_measured_memory(tmp_path, store):
    planned = packed(tmp_path)
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
    fixed = packed(tmp_path, f"{EXPERIMENT}resources: {{gpus: 0.25}}\n")
    assert smoke(store, Ends(), requested=False)[0](fixed, lambda: None) == fixed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_peak_is_the_allocators(tmp_path):
    result = run_smoke_test(SmokeTest.of(packed(tmp_path)[0].trial))
    assert result.device_bytes == torch.cuda.get_device_properties(0).total_memory
    assert 2**20 < result.peak_bytes < 2**32


def test_hellaswag_is_had_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "hellaswag_val.jsonl").write_text("not the set")
    path, experiment = write_tiny_sweep(tmp_path), tmp_path / "e.yaml"
    prefetch_evaluation_sets(plan(load_sweep(path)).trials, print)
    experiment.write_text(experiment.read_text().replace("loss_tokens: 64", "hellaswag: 5"))
    with pytest.raises(DataError, match="is not HellaSwag"):
        prefetch_evaluation_sets(plan(load_sweep(path)).trials, print)


def stale(task, probe):
    """Answer from a copy of what was there, as a stale mount shows it."""
    folder = Path(probe.replace("runs", "stale"))
    folder.mkdir(parents=True)
    (folder / "driver").write_text((Path(probe) / "driver").read_text())
    return task(str(folder))


def unreadable(_task, probe):
    """Answer with a name that is there and cannot be read, as by a stale handle."""
    (Path(probe) / "answer").mkdir()
    return "answer"


@pytest.mark.parametrize(
    ("far", "problem"),
    [
        (lambda task, probe: task(probe), ""),
        (unreadable, "far writes files that do not arrive here"),
        (lambda task, probe: task(probe.replace("runs", "nowhere")), "far has no "),
        (lambda task, probe: task(probe.replace("runs", "local")), "another one than the driver"),
        (stale, "far writes files that do not arrive here"),
        (lambda *_: RuntimeError("Traceback:\n  deep\nNo module named 'kvlab'"),
         "far cannot run kvlab: No module named 'kvlab'"),
    ],
)  # fmt: skip
def test_a_machine_that_does_not_share_the_store_is_named_with_the_reason(
    tmp_path, monkeypatch, far, problem
):
    monkeypatch.setattr(preparation, "PATIENCE_SECONDS", 0.3)
    folder = tmp_path / "runs" / "sweeps" / "s"
    (tmp_path / "local" / "sweeps" / "s").mkdir(parents=True)

    def everywhere(task, probe):
        return {"near": task(probe), "far": far(task, probe)}

    if not problem:
        check_store_is_shared(tmp_path / "runs", folder, everywhere)
    else:
        with pytest.raises(UsageError, match="is not shared by 1 of 2 machines") as caught:
            check_store_is_shared(tmp_path / "runs", folder, everywhere)
        assert problem in str(caught.value)
        assert "\n" not in str(caught.value)
    assert os.listdir(folder) == []
