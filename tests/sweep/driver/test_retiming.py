"""Timing trials again at the end of a sweep: when, which, what is kept, and what reads it."""

import pytest

from kvlab.analysis.study import Study
from kvlab.errors import RecordDamaged
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.report.sections.speed import report_speed
from kvlab.store.provenance import DataProvenance, Machine, Origin, build_provenance
from kvlab.store.result import TrialMeasurements
from kvlab.store.timings import TIMINGS_FILE, read_timings
from kvlab.store.verification import heal, verify_record
from kvlab.sweep.driver.retiming import announce_retiming, plan_retiming, time_again
from kvlab.sweep.executors.inline import InlineExecutor
from kvlab.sweep.planning.planner import describe_sweep
from kvlab.trial.trial import build_result
from tests.support.stub_trials import SWEEP, tiny_plan

TIMES = {"ttft_ms": 9.0, "tpot_ms_p50": 8.0, "training_tokens_per_second": 70.0}
LINES = [{"metric": "kv_storage", "value": 5}, {"metric": "tpot", "value": 0.008}]


def first_times(trial):
    return {**TIMES, "tpot_ms_p50": 8.0 + int(trial.id[:2], 16) / 256}


def write_trial(store, trial, timings="shared", loss=2.0):
    machine = Machine("stub", 1, timings)
    data = DataProvenance("0" * 64, trial.data_identity, "none", "bytes")
    facts = build_provenance(Origin(), started="", attempts=1, machine=machine, data=data)
    facts |= {"started": "2026-01-01T10:00:00Z", "finished": "2026-01-01T10:10:00Z"}
    curves = {"train_loss": [], "validation_loss": []}
    measured = TrialMeasurements(
        {"loss": loss, **first_times(trial)}, curves, {"steps": 20}, machine, data, benchmark=LINES
    )
    store.write_result(build_result(trial, "done", facts, measured=measured))


def record(folder, store, timings="shared", mode="auto", mqa=""):
    """Write a sweep whose trials ran side by side; return its plan."""
    retime = f"benchmark.retime: {mode}"
    text = SWEEP.replace("mha: {}", f"mha: {{{retime}}}").replace(
        "mqa: {", f"mqa: {{{retime}, {mqa}"
    )
    planned = tiny_plan(folder, store, text)
    for one in planned.trials:
        write_trial(store, one.trial, timings)
    store.write_sweep(describe_sweep(planned, yaml="y", experiment_yaml="e", command="c"))
    return tiny_plan(folder, store, text)


class StubSession:
    """Answer as a worker; ``fail`` maps the number of a call to what goes wrong."""

    def __init__(self, fail=None, value=1.0):
        self.tasks, self.fail, self.value = [], fail or {}, value

    def __call__(self, task):
        self.tasks.append(task)
        problem = self.fail.get(len(self.tasks), "")
        if callable(problem):
            return problem()
        answer = {
            "started": "2026-01-01T11:00:00Z",
            "finished": f"2026-01-01T11:00:{len(self.tasks):02}Z",
            "device": "stub",
            "threads": 1,
            "disturbance": problem if problem.startswith("other") else "",
            "trials": {
                trial: {
                    "measurements": {"ttft_ms": self.value, "tpot_ms_p50": self.value + number},
                    "benchmark": [{"metric": "tpot", "value": self.value}],
                }
                for number, trial in enumerate(task.experiments)
            },
        }
        return {"error": problem} if problem == "out of memory" else answer


def run_retiming(planned, store, fail=None, *, value=1.0, repeat=False):
    """Return whether it is over, the tasks that ran, and the lines for people."""
    lines, session = [], StubSession(fail, value)
    flag, executor = store.new_driver_stop_flag("s"), InlineExecutor(session)
    origin = Origin("c0ffee")
    is_over = time_again(planned, store, executor, origin, flag, lines.append, repeat=repeat)
    return is_over, session.tasks, lines


def obstacle(store):
    return Study.load(store, "s").timing_obstacle


def test_trials_of_different_texts_are_timed_together(tmp_path, store):
    planned = record(tmp_path, store, mqa="data.validation_fraction: 0.2, ")
    _, tasks, _ = run_retiming(planned, store)
    assert [len(task.experiments) for task in tasks] == [4, 4]


def test_trials_of_a_seed_are_timed_together_and_the_new_times_are_read(tmp_path, store):
    planned = record(tmp_path, store)
    before = Study.load(store, "s")
    assert before.is_disturbed("tpot_ms_p50")
    assert before.effects("tpot_ms_p50")[0].verdict_name == "disturbed"
    over, tasks, lines = run_retiming(planned, store)
    assert over
    assert "timing 8 trials in 2 sessions again, alone and in turns" in lines[0]
    assert [(task.seed, len(task.experiments)) for task in tasks] == [(0, 4), (1, 4)]
    base = planned.trials[0].trial
    first = {"loss": 2.0, **first_times(base)}
    assert store.result(base.id)["measurements"] == first  # written once
    again = store.result(base.id, store.timings("s"))
    assert again["measurements"] == {**first, "ttft_ms": 1.0, "tpot_ms_p50": 1.0}
    assert [line["metric"] for line in again["benchmark"]] == ["kv_storage", "tpot"]
    assert (again["timing"]["trials"], again["timing"]["commit"]) == (4, "c0ffee")
    study = Study.load(store, "s")
    assert not study.timing_obstacle
    effect = study.effects("tpot_ms_p50")[0]
    assert (effect.verdict_name != "disturbed", effect.value) == (True, 2.0)
    assert study.is_disturbed("training_tokens_per_second")  # a training is not repeated
    text = " ".join(map(str, report_speed(study).contents[0].spans))
    assert "All trials were timed again at the end of the sweep" in text
    assert not plan_retiming(planned, store)[0]


def test_a_result_that_does_not_say_how_it_was_timed_is_refused(tmp_path, store):
    planned = record(tmp_path, store)
    path = store.trial_directory(planned.trials[0].trial.id) / "result.json"
    result = read_sealed_json(path)
    del result["provenance"]
    write_sealed_json(path, result)
    with pytest.raises(RecordDamaged, match="the record of s "):
        plan_retiming(planned, store)


@pytest.mark.parametrize(("timings", "mode"), [("exclusive", "auto"), ("shared", "never")])
def test_times_that_compare_or_are_not_to_be_taken_again_are_left_alone(
    tmp_path, store, timings, mode
):
    planned = record(tmp_path, store, timings, mode)
    assert not plan_retiming(planned, store)[1]
    assert bool(announce_retiming(planned, 2)) == (mode == "auto")
    assert not announce_retiming(planned, 1)


@pytest.mark.parametrize("problem", ["other processes used 40% of the cores", "out of memory"])
def test_a_session_that_fails_leaves_the_first_times_and_is_repeated_only_if_asked(
    tmp_path, store, problem
):
    planned = record(tmp_path, store)
    _, tasks, lines = run_retiming(planned, store, {1: problem})
    assert [task.seed for task in tasks] == [0, 1]
    assert f"{problem}; the first times stay, marked as disturbed" in lines[1]
    assert "4 of 8 trials were timed while" in obstacle(store)
    assert store.timings("s").keys() == set(tasks[1].experiments)
    assert not plan_retiming(planned, store)[0]
    assert not run_retiming(planned, store)[1]
    assert [task.seed for task in run_retiming(planned, store, repeat=True)[1]] == [0]
    assert not obstacle(store)
    assert not verify_record(store).damaged


def test_after_a_stop_or_a_kill_only_what_is_not_recorded_is_timed(tmp_path, store):
    planned = record(tmp_path, store)

    def stop():
        store.stop_flag("s").touch()
        return "stopped"

    def kill():
        raise KeyboardInterrupt

    assert not run_retiming(planned, store, {1: stop})[0]
    assert not read_timings(store.sweep_directory("s"))
    assert not store.stop_flag("s").exists()
    with pytest.raises(KeyboardInterrupt):
        run_retiming(planned, store, {2: kill})
    over, tasks, lines = run_retiming(planned, store)
    assert (over, [task.seed for task in tasks]) == (True, [1])
    assert "timing 4 trials in 1 session" in lines[0]
    assert not obstacle(store)


def test_times_of_a_result_that_was_made_again_do_not_count(tmp_path, store):
    planned = record(tmp_path, store)
    run_retiming(planned, store)
    trial = planned.trials[0].trial
    (store.trial_directory(trial.id) / "result.json").unlink()
    write_trial(store, trial, loss=3.0)
    assert store.result(trial.id, store.timings("s"))["measurements"]["tpot_ms_p50"] >= 8.0
    run_retiming(planned, store, {1: "out of memory"})
    assert "1 of 8 trials" in obstacle(store), "it replaces no times"
    tasks = run_retiming(planned, store, value=2.0, repeat=True)[1]
    assert [task.seed for task in tasks] == [trial.seed]
    assert len(read_timings(store.sweep_directory("s"))) == 2
    assert not obstacle(store)


def test_damage_is_found_and_leaves_the_first_times(tmp_path, store):
    planned = record(tmp_path, store)
    run_retiming(planned, store)
    path = store.sweep_directory("s") / TIMINGS_FILE
    sealed = read_sealed_json(path)
    next(iter(sealed["sessions"][0]["trials"].values()))["measurements"]["tpot_ms_p50"] = "fast"
    flip = lambda: path.write_text(path.read_text().replace("1.0", "0.1"))  # noqa: E731
    for harm in (flip, lambda: write_sealed_json(path, sealed)):
        harm()
        assert obstacle(store)
        [damage] = verify_record(store).damaged
        assert damage.path == f"sweeps/s/{TIMINGS_FILE}"
        assert heal(damage.directory)
        run_retiming(planned, store)
        assert not verify_record(store).damaged
        assert not obstacle(store)
