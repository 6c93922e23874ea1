"""Retries through the real driver and record: shrink, wait, back off, halt."""

import errno
import json

import pytest

from kvlab.errors import WorkerKilled
from kvlab.spec import ResourcesConfig
from kvlab.spec.sweep import FailuresConfig
from kvlab.store.attempt import write_progress
from kvlab.sweep import Driver
from kvlab.sweep.driver import retry_policy
from kvlab.sweep.driver.retry_policy import RetryPolicy, smaller_microbatch
from kvlab.sweep.executors.executor import EndedTask
from kvlab.sweep.executors.inline import InlineExecutor
from tests.support.stub_trials import StubRun, StubTrainable, drive, tiny_plan

ONE = """\
question: q
experiment: e.yaml
factors:
  heads:
    mha: {%s}
failures: {backoff_seconds: 0%s}
"""


class Anywhere(InlineExecutor):
    """Run all trials here, whatever they request, and end the first attempts for memory."""

    kills = 0

    def _run_apart(self, task):
        return self._run(task)

    def check_requests(self, requests):
        pass

    def wait(self, seconds):
        if self.kills and self._task is not None:
            self.kills -= 1
            task, self._task = self._task, None
            return [EndedTask(task.id, error=MemoryError("the machine's memory ran out"))]
        return super().wait(seconds)


@pytest.fixture
def run_one(tmp_path, store, monkeypatch):
    """Return a function that runs one trial, which may fail.

    Its arguments are the settings of the trial, what raises an error, how often the machine kills
    the trial, and more settings of ``failures``. It returns the result, the reasons for which the
    trial was started again, and the numbers of its attempts.
    """
    monkeypatch.setattr(retry_policy, "MEMORY_WAIT_SECONDS", 0.01)

    def run(settings="", fail=lambda *_: None, *, kills=0, failures=""):
        planned, events = tiny_plan(tmp_path, text=ONE % (settings, failures)), []

        class Failing(StubTrainable):
            def act(self, kind, step):
                fail(self.trial, kind, step)

        class FailingRun(StubRun):
            trainable = Failing

        executor = Anywhere(FailingRun(store.path))
        executor.kills = kills
        Driver(planned, store, executor, on_event=events.append).run()
        trial = planned.trials[0].trial.id
        told = [event.message for event in events if event.kind == "retried"]
        return store.result(trial), told, store.attempts(trial)

    return run


def needs_less_than(most):
    """Run out of memory in training above a number of tokens in one pass."""

    def fail(trial, part, step):
        if (part, step) == ("train", 0) and (trial.resources.microbatch_tokens or 16) > most:
            raise MemoryError

    return fail


def test_out_of_memory_shrinks_the_microbatch_until_it_fits(run_one, store):
    result, told, attempts = run_one("resources.microbatch_tokens: 16", needs_less_than(8))
    assert (result["status"], attempts) == ("done", [1, 2])
    assert result["experiment"]["resources"]["microbatch_tokens"] == 8
    first = json.loads((store.attempt_directory(result["trial"], 1) / "result.json").read_text())
    assert first["error"]["class"] == "host_memory"
    assert told == ["host memory ran out (MemoryError); again with microbatch_tokens = 8"]


@pytest.mark.parametrize(("most", "failures", "attempts"), [
    (0, "", [1, 2, 3]),  # no microbatch fits, nor does it after a wait
    (8, ", out_of_memory: fail", [1]),  # switched off
])  # fmt: skip
def test_what_does_not_fit_is_recorded_as_failed(run_one, most, failures, attempts):
    result, _, tried = run_one("", needs_less_than(most), failures=failures)
    assert (result["status"], tried) == ("failed", attempts)


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, 768),  # on CPU a tiny model takes all 12 rows of 128 at once, and 6 are half of them
        ({"microbatch_tokens": 512}, 256),
        ({"microbatch_tokens": 128}, None),
        ({"gpus": 1.0}, 384),
        ({"gpus": 1.0, "microbatch_tokens": 384}, 128),
        ({"gpus": 2.0}, 128),  # each of two workers has 6 rows
        ({"gpus": 12.0}, None),  # one row each
    ],
)
def test_the_next_smaller_microbatch_divides_the_step(tmp_path, resources, expected):
    settings = "model.block_size: 128, training.batch_tokens: 1536, training.tokens: 3072"
    experiment = tiny_plan(tmp_path, text=ONE % (settings, "")).trials[0].trial.experiment
    experiment = experiment.model_copy(update={"resources": ResourcesConfig(**resources)})
    assert smaller_microbatch(experiment) == expected


@pytest.mark.parametrize(
    ("part", "error", "expected"),
    [
        ("train", RuntimeError("CUDA error: out of memory"), (0.5, 8)),  # half of the rows
        ("train", OSError(errno.ENOMEM, "Cannot allocate memory"), (1.0, 16)),  # the host's
        ("measure", RuntimeError("CUDA error: out of memory"), (1.0, 16)),  # it is trained
    ],
)
def test_on_a_gpu_a_smaller_microbatch_is_for_the_memory_of_training_alone(
    run_one, part, error, expected
):
    def fail(trial, *now):
        used = trial.resources.gpus, trial.resources.microbatch_tokens
        if now == (part, 0) and used == (0.5, 16):
            raise error

    result, _, _ = run_one("resources.gpus: 0.5, resources.microbatch_tokens: 16", fail)
    used = result["experiment"]["resources"]
    assert (used["gpus"], used["microbatch_tokens"]) == expected


@pytest.mark.parametrize(("kills", "microbatch"), [(1, None), (2, 8)])
def test_a_trial_that_others_took_the_memory_from_waits_and_runs_once_more(
    run_one, kills, microbatch
):
    result, told, _ = run_one(kills=kills)
    assert result["status"] == "done"
    assert result["experiment"]["resources"]["microbatch_tokens"] == microbatch
    assert told[0] == "the machine's memory ran out; again in 0.01s, as others may have taken it"
    assert len(told) == kills


@pytest.mark.parametrize(("gpus", "status"), [(0.5, "done"), (1.0, "failed")])
def test_a_fault_of_a_shared_gpu_is_not_the_trials_own(run_one, gpus, status):
    faults = [RuntimeError("CUDA error: an illegal memory access was encountered")]

    def fail(_, *now):
        if now == ("train", 7) and faults:
            raise faults.pop()

    result, told, _ = run_one(f"resources.gpus: {gpus}", fail)
    assert result["status"] == status
    reason = "the GPU that it shares failed: CUDA error: an illegal"
    assert [one.startswith(reason) for one in told] == [True] * (gpus < 1)


def test_the_same_error_again_and_again_ends_the_sweep_early(tmp_path, store, planned):
    events = []
    script = {(one.trial.id, "measure", 0): "bug" for one in planned.trials}
    summary = drive(planned, store, StubRun(store.path, script=script), on_event=events.append)
    assert (summary.exit_code, summary.states["failed"], summary.states["missing"]) == (1, 3, 5)
    assert summary.halt_reason.startswith(
        "no more trials are started, as 3 failed at the same place (ValueError: no way to measure"
    )
    assert [event.message for event in events if event.kind == "halted"] == [summary.halt_reason]
    again = tiny_plan(tmp_path, store)
    assert drive(again, store, StubRun(store.path), retry_failed=True).states["done"] == 8


def test_errors_at_different_places_do_not_end_it(store, planned):
    """Nor do divergences, which are findings."""
    acts = {0: ("measure", "bug"), 3: ("measure", "bug"), 4: ("train", "bug")}
    acts |= dict.fromkeys((1, 2, 5, 6), ("measure", "diverge"))
    script = {(planned.trials[n].trial.id, part, 0): act for n, (part, act) in acts.items()}
    summary = drive(planned, store, StubRun(store.path, script=script))
    assert summary.halt_reason == ""
    assert summary.states == {"failed": 3, "diverged": 4, "done": 1, "missing": 0}


@pytest.fixture
def killed(store, planned):
    """Return a function that says what follows a kill, and the path of the trial's progress."""
    trial = planned.trials[0]
    path = store.trial_directory(trial.trial.id) / "progress.json"
    path.parent.mkdir(parents=True)

    def configure(**config):
        policy = RetryPolicy(FailuresConfig(**config), store, InlineExecutor(None))
        return lambda: policy.after_kill(trial, WorkerKilled("its process died"))

    return configure, path


def test_a_killed_trial_waits_longer_each_time_until_it_has_died_too_often(killed):
    again = killed[0](killed_retries=3, backoff_seconds=2.0)
    decisions = [again() for _ in range(4)]
    assert [one and one.delay_seconds for one in decisions] == [2.0, 4.0, 8.0, None]
    assert decisions[1].reason == "its process died; retry 2 of 3 in 4s"
    again = killed[0](killed_retries=1000, backoff_seconds=1.0)
    assert [again().delay_seconds for _ in range(40)][-1] == 300.0


def test_a_trial_that_gets_further_between_kills_is_not_given_up(killed):
    again, path = killed[0](killed_retries=1), killed[1]
    for step in range(5):
        write_progress(path, {"stage": "training", "step": step})
        assert again() is not None
    assert again() is None
    write_progress(path, {"stage": "evaluation"})
    assert again() is not None
