"""Retries through the real driver and record: shrink, back off, halt."""

import errno
import json

import pytest

from kvlab.errors import WorkerKilled
from kvlab.spec import ResourcesConfig
from kvlab.spec.sweep import FailuresConfig
from kvlab.store import Store
from kvlab.store.attempt import write_progress
from kvlab.sweep import Driver
from kvlab.sweep.driver import retry_policy
from kvlab.sweep.driver.retry_policy import RetryPolicy, smaller_microbatch
from kvlab.sweep.executors.executor import EndedTask
from kvlab.sweep.executors.inline import InlineExecutor
from tests.support.stub_trials import SWEEP, StubRun, StubTrainable, drive, tiny_plan

ONE = SWEEP.replace("seeds: [0, 1]", "seeds: [0]").replace(
    '    tied: {serving.tie: "adjacent:2"}\n', ""
)


class Anywhere(InlineExecutor):
    """An executor that can meet every request."""

    def check_requests(self, requests):
        pass


class HungryRun(StubRun):
    """Trials that run out of memory in training above a number of tokens in one pass."""

    def __init__(self, store, most):
        super().__init__(store)
        self.most = most

    def make(self, trial, report):
        is_large = (trial.resources.microbatch_tokens or 16) > self.most
        script = {(trial.id, "train", 0): "memory"} if is_large else {}
        return StubTrainable(trial, report, flag=self.flag, script=script)


def test_out_of_memory_shrinks_the_microbatch_until_it_fits(tmp_path):
    store, events = Store(tmp_path / "runs"), []
    planned = tiny_plan(
        tmp_path, text=ONE.replace("mqa: {", "mqa: {resources.microbatch_tokens: 16, ")
    )
    summary = drive(planned, store, HungryRun(store.path, most=8), on_event=events.append)
    assert (summary.exit_code, summary.states["done"]) == (0, 2)
    for one in planned.trials:
        result = store.result(one.trial.id)
        assert result["experiment"]["resources"]["microbatch_tokens"] == 8
        assert store.attempts(one.trial.id) == [1, 2]
        first = json.loads((store.attempt_directory(one.trial.id, 1) / "result.json").read_text())
        assert first["error"]["class"] == "host_memory"
    told = [event.message for event in events if event.kind == "retried"]
    assert told == ["host memory ran out (MemoryError); again with microbatch_tokens = 8"] * 2


@pytest.mark.parametrize(("most", "more", "attempts"), [
    (0, "", [1, 2, 3]),  # no microbatch fits, nor does it after a wait
    (8, "failures: {out_of_memory: fail}\n", [1]),  # switched off
])  # fmt: skip
def test_what_does_not_fit_is_recorded_as_failed(
    tmp_path, store, most, more, attempts, monkeypatch
):
    monkeypatch.setattr(retry_policy, "MEMORY_WAIT_SECONDS", 0.01)
    planned = tiny_plan(tmp_path, text=ONE + more)
    summary = drive(planned, store, HungryRun(store.path, most))
    assert (summary.exit_code, summary.states["failed"]) == (1, 2)
    assert store.attempts(planned.trials[0].trial.id) == attempts


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, 768),  # on CPU a tiny model takes all 12 rows of 128 at once, and 6 are half of them
        ({"microbatch_tokens": 512}, 256),
        ({"microbatch_tokens": 128}, None),
        ({"gpus": 1.0}, 384),
        ({"gpus": 1.0, "microbatch_tokens": 384}, 128),
    ],
)
def test_the_next_smaller_microbatch_divides_the_step(tmp_path, resources, expected):
    text = ONE.replace(
        "mha: {}",
        "mha: {model.block_size: 128, training.batch_tokens: 1536, training.tokens: 3072}",
    )
    experiment = tiny_plan(tmp_path, text=text).trials[0].trial.experiment
    experiment = experiment.model_copy(update={"resources": ResourcesConfig(**resources)})
    assert smaller_microbatch(experiment) == expected


@pytest.mark.parametrize(
    ("stage", "error", "expected"),
    [
        ("train", RuntimeError("CUDA error: out of memory"), (0.5, 8)),  # half of the rows
        ("train", OSError(errno.ENOMEM, "Cannot allocate memory"), (1.0, 16)),  # the host's
        ("measure", RuntimeError("CUDA error: out of memory"), (1.0, 16)),  # it is trained
    ],
)
def test_on_a_gpu_a_smaller_microbatch_is_for_the_memory_of_training_alone(
    tmp_path, store, stage, error, expected
):
    text = "question: q\nexperiment: e.yaml\nfactors:\n  heads:\n    mha: {resources.gpus: 0.5, resources.microbatch_tokens: 16}\n"
    planned = tiny_plan(tmp_path, text=text)

    class Once(StubTrainable):
        def act(self, now, step):
            resources = self.trial.resources
            if (now, step, resources.gpus, resources.microbatch_tokens) == (stage, 0, 0.5, 16):
                raise error

    class OnceRun(StubRun):
        def make(self, trial, report):
            return Once(trial, report, flag=self.flag)

    assert Driver(planned, store, Anywhere(OnceRun(store.path))).run().exit_code == 0
    used = store.result(planned.trials[0].trial.id)["experiment"]["resources"]
    assert (used["gpus"], used["microbatch_tokens"]) == expected


class NoMemory(InlineExecutor):
    """An executor that ends the first attempts at a trial, as the machine's memory runs out."""

    def __init__(self, run, kills):
        super().__init__(run)
        self.kills = kills

    def wait(self, seconds):
        if self.kills and self._task is not None:
            self.kills -= 1
            task, self._task = self._task, None
            return [EndedTask(task.id, error=MemoryError("the machine's memory ran out"))]
        return super().wait(seconds)


@pytest.mark.parametrize(("kills", "microbatch"), [(1, None), (2, 8)])
def test_a_trial_that_others_took_the_memory_from_waits_and_runs_once_more(
    tmp_path, store, monkeypatch, kills, microbatch
):
    monkeypatch.setattr(retry_policy, "MEMORY_WAIT_SECONDS", 0.01)
    planned, events = (
        tiny_plan(tmp_path, text=ONE.replace("    mqa: {model.n_kv_head: 1}\n", "")),
        [],
    )
    executor = NoMemory(StubRun(store.path), kills)
    assert Driver(planned, store, executor, on_event=events.append).run().states["done"] == 1
    used = store.result(planned.trials[0].trial.id)["experiment"]["resources"]
    assert used["microbatch_tokens"] == microbatch
    told = [event.message for event in events if event.kind == "retried"]
    assert told[0] == "the machine's memory ran out; again in 0.01s, as others may have taken it"
    assert len(told) == kills


@pytest.mark.parametrize("gpus", [0.5, 1.0])
def test_a_fault_of_a_shared_gpu_is_not_the_trials_own(tmp_path, store, gpus):
    text = f"question: q\nexperiment: e.yaml\nfactors:\n  heads:\n    mha: {{resources.gpus: {gpus}}}\n"
    planned, faults = tiny_plan(tmp_path, text=text + "failures: {backoff_seconds: 0}\n"), [1]

    class Faulty(StubTrainable):
        def act(self, now, step):
            if (now, step) == ("train", 7) and faults:
                faults.pop()
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class FaultyRun(StubRun):
        trainable = Faulty

    events = []
    driver = Driver(planned, store, Anywhere(FaultyRun(store.path)), on_event=events.append)
    assert driver.run().states["done" if gpus < 1 else "failed"] == 1
    told = [event.message for event in events if event.kind == "retried"]
    assert [
        one.startswith("the GPU that it shares failed: CUDA error: an illegal") for one in told
    ] == ([True] if gpus < 1 else [])


def test_the_same_error_again_and_again_ends_the_sweep_early(tmp_path, planned):
    store, events = Store(tmp_path / "runs"), []
    script = {(one.trial.id, "measure", 0): "bug" for one in planned.trials}
    summary = drive(planned, store, StubRun(store.path, script=script), on_event=events.append)
    assert (summary.exit_code, summary.states["failed"], summary.states["missing"]) == (1, 3, 5)
    assert summary.halt_reason.startswith(
        "no more trials are started, as 3 failed at the same place (ValueError: no way to measure"
    )
    assert [event.message for event in events if event.kind == "halted"] == [summary.halt_reason]
    mended = Driver(
        tiny_plan(tmp_path, store), store, InlineExecutor(StubRun(store.path)), retry_failed=True
    ).run()
    assert mended.states["done"] == 8


def test_errors_at_different_places_do_not_end_it(store, planned):
    kinds = ["bug", "memory", "bug", "diverge", "diverge", "diverge", "memory", "diverge"]
    script = {
        (p.trial.id, "measure", 0): kind for p, kind in zip(planned.trials, kinds, strict=True)
    }
    summary = drive(planned, store, StubRun(store.path, script=script))
    assert summary.halt_reason == ""
    assert summary.states == {"failed": 4, "diverged": 4, "missing": 0}


def killed(tmp_path, **config):
    tmp_path.mkdir(exist_ok=True)
    store = Store(tmp_path / "runs")
    planned = tiny_plan(tmp_path).trials[0]
    path = store.trial_directory(planned.trial.id) / "progress.json"
    path.parent.mkdir(parents=True)
    policy = RetryPolicy(FailuresConfig(**config), store, InlineExecutor(None))
    return planned, path, lambda: policy.after_kill(planned, WorkerKilled("its process died"))


def test_a_killed_trial_waits_longer_each_time_until_it_has_died_too_often(tmp_path):
    _, _, again = killed(tmp_path, killed_retries=3, backoff_seconds=2.0)
    decisions = [again() for _ in range(4)]
    assert [one and one.delay_seconds for one in decisions] == [2.0, 4.0, 8.0, None]
    assert decisions[1].reason == "its process died; retry 2 of 3 in 4s"
    _, _, again = killed(tmp_path / "b", killed_retries=1000, backoff_seconds=1.0)
    assert [again().delay_seconds for _ in range(40)][-1] == 300.0


def test_a_trial_that_gets_further_between_kills_is_not_given_up(tmp_path):
    _, path, again = killed(tmp_path, killed_retries=1)
    for step in range(5):
        write_progress(path, {"stage": "training", "step": step})
        assert again() is not None
    assert again() is None
    write_progress(path, {"stage": "evaluation"})
    assert again() is not None
