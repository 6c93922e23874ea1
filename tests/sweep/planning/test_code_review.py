"""Results of other code: which there are, whether going on mixes them, and running them again."""

import pytest

from kvlab.errors import StoreError, UsageError
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.store.provenance import Origin
from kvlab.sweep import Driver
from kvlab.sweep.executors.inline import InlineExecutor
from kvlab.sweep.planning.code_review import review_code, run_again
from kvlab.sweep.planning.stages import plan_stage, reopen_preparations
from kvlab.trial.code_identity import this_code
from kvlab.trial.run import run_task
from tests.support.code_versions import running_code
from tests.support.extensions import needs
from tests.support.stub_looks import TUNED, SurfaceRun, drive_looks, load_looks
from tests.support.stub_search import SEARCH, history, searching
from tests.support.stub_trials import SWEEP, StubRun, drive, identify, read_numbers, write_sweep

ONE_HEAD = SWEEP.replace("    mqa: {model.n_kv_head: 1}\n", "")
PLAIN = SWEEP.replace('    tied: {serving.tie: "adjacent:2"}\n', "")


def next_stage(folder, store, text=SWEEP):
    return plan_stage(load_sweep(write_sweep(folder, text)), store, identify=identify)


def review(folder, store, text=SWEEP):
    """Return the next stage and the review of its code."""
    stage = next_stage(folder, store, text)
    return stage, review_code(stage, store)


def submit(folder, store, text=SWEEP, run=StubRun):
    planned = next_stage(folder, store, text).plan
    return drive(planned, store, run(store.path))


def codes(store):
    found = (store.code(trial) for trial in store.trial_ids())
    return {(*code["training"], code["measurement"]) for code in found}


def read_steps(store):
    return sum(len(path.read_text().split()) for path in store.path.glob("trainings/*/steps.log"))


def test_what_other_code_has_trained_runs_again_and_is_kept(tmp_path, store):
    with running_code("t1"):
        submit(tmp_path, store)
        assert review(tmp_path, store)[1].describe() == ""
        trained = store.path.glob("trainings/*/final/model.safetensors")
        before = {path.relative_to(store.path): path.read_bytes() for path in trained}
        results = {trial: store.result_seal(trial) for trial in store.trial_ids()}
    with running_code("t2"):
        stage, found = review(tmp_path, store)
        assert (len(found.others), found.to_run, found.is_mixing) == (8, 0, False)
        assert {one.code.compare() for one in stage.plan.trials} == {"other"}
        run_again(stage, found, store)
        after, again = review(tmp_path, store)
        assert after.plan.count_states() == {"new": 4, "shares training": 4}
        assert again.describe() == ""
        submit(tmp_path, store)
        assert codes(store) == {("t2", "m1")}
    for path, data in before.items():
        aside = store.path / path.parts[0] / path.parts[1] / "other-code" / "1" / "final"
        assert (aside / path.name).read_bytes() == data
    for trial, seal in results.items():
        kept = store.attempt_directory(trial, 1) / "result.json"
        assert seal in kept.read_text()
        assert (kept.with_name("items.jsonl.gz")).exists()


def test_what_other_code_has_measured_is_measured_again_on_the_same_weights(tmp_path, store):
    with running_code("t1", "m1"):
        submit(tmp_path, store)
    steps = read_steps(store)
    with running_code("t1", "m2"):
        stage, found = review(tmp_path, store)
        assert len(found.others) == 8
        run_again(stage, found, store)
        assert next_stage(tmp_path, store).plan.count_states() == {"shares training": 8}
        submit(tmp_path, store)
        assert codes(store) == {("t1", "m2")}
    assert read_steps(store) == steps


def test_going_on_mixes_where_codes_differ_within_training_or_measurement(tmp_path, store):
    with running_code("t1", "m1"):
        submit(tmp_path, store, ONE_HEAD)
    with running_code("t1", "m1"):
        assert not review(tmp_path, store)[1].is_mixing
    for code in (("t2", "m1"), ("t1", "m2")):
        with running_code(*code):
            _, found = review(tmp_path, store)
            assert (len(found.others), found.to_run, found.is_mixing) == (4, 4, True)
            assert found.describe() == "4 of 4 trials that have ended ran other code"


def test_serving_trained_weights_in_a_new_way_mixes_nothing(tmp_path, store):
    """Every trial is trained by the earlier code and measured by an equal one."""
    with running_code("t1", "m1"):
        submit(tmp_path, store, PLAIN)
    with running_code("t2", "m1"):
        stage, found = review(tmp_path, store)
        assert (len(found.others), len(found.begun), found.is_mixing) == (4, 4, False)
        assert "4 trials to run go on from what other code has trained" in found.describe()
        submit(tmp_path, store)
        assert codes(store) == {("t1", "m1")}
        stage, found = review(tmp_path, store)
        run_again(stage, found, store)
        assert next_stage(tmp_path, store).plan.count_states() == {"new": 4, "shares training": 4}


def test_a_training_that_was_begun_by_other_code_is_named(tmp_path, store):
    with running_code("t1"):
        trial = next_stage(tmp_path, store).plan.trials[0].trial
        store.write_divergence(trial.training_id, "nan", ["t1"])
    with running_code("t2"):
        stage, found = review(tmp_path, store)
        assert (found.others, found.begun[0], found.is_mixing) == ([], trial.id, True)
        run_again(stage, found, store)
        assert store.divergence(trial.training_id) is None
        assert review(tmp_path, store)[1].describe() == ""


def test_a_record_from_before_is_unknown_and_not_other(tmp_path, store):
    with running_code("", ""):
        submit(tmp_path, store, ONE_HEAD)
    with running_code("t1"):
        stage, found = review(tmp_path, store)
        assert (found.others, found.unknown, found.is_mixing) == ([], 4, False)
        assert found.describe() == ""
        assert stage.plan.trials[0].code.compare() == "unknown"


def test_a_kill_between_the_result_and_its_training_leaves_both_to_run_again(tmp_path, store):
    with running_code("t1"):
        submit(tmp_path, store)
    with running_code("t2"):
        for trial in store.trial_ids():  # as far as it came
            store.archive_result(trial)
        stage, found = review(tmp_path, store)
        assert (len(found.begun), found.is_mixing) == (8, False)
        run_again(stage, found, store)
        submit(tmp_path, store)
        assert codes(store) == {("t2", "m1")}


def test_what_a_process_uses_is_not_set_aside(tmp_path, store, monkeypatch):
    monkeypatch.setattr("kvlab.sweep.planning.code_review.LOCK_SECONDS", 0.1)
    with running_code("t1"):
        submit(tmp_path, store)
        before = read_numbers(store, next_stage(tmp_path, store).plan)
    with running_code("t2"):
        stage, found = review(tmp_path, store)
        with (
            store.trial_lock(found.others[0]).hold(),
            pytest.raises(StoreError, match="cannot be set aside; wait for it"),
        ):
            run_again(stage, found, store)
        with store.driver_lock("s").hold(), pytest.raises(UsageError, match="another driver"):
            run_again(stage, found, store)
        assert read_numbers(store, stage.plan) == before


def test_a_look_that_was_taken_is_not_taken_with_other_code(tmp_path, store):
    sweep = load_looks(tmp_path)
    with running_code("t1"):
        drive_looks(sweep, store)
    with running_code("t2"):
        stage = plan_stage(sweep, store, identify=identify)
        with pytest.raises(UsageError, match=r"claims were tested .* seeds that no test has seen"):
            run_again(stage, review_code(stage, store), store)


@needs("tuning")
def test_rates_are_found_again_by_this_code(tmp_path, store, monkeypatch):
    def tune():
        sweep = load_sweep(write_sweep(tmp_path, TUNED))
        drive_looks(sweep, store, run=SurfaceRun)

    with running_code("t1"):
        tune()
    with running_code("t2"):
        stage, found = review(tmp_path, store, TUNED)
        tuning = {t for c in stage.record["tuning"]["cells"] for t in c["trials"].values()}
        assert tuning < set(found.others)
        with monkeypatch.context() as patch:
            patch.setattr(Store, "status", lambda *_: "failed")
            reopen_preparations(store, "s", [])  # of others alone, which --code rerun asks for
            assert store.sweep("s")["tuning"]["is_over"]
        reopen_preparations(store, "s", found.others)
        run_again(stage, found, store)
        assert next_stage(tmp_path, store, TUNED).is_preparing
        tune()
        assert codes(store) == {("t2", "m1")}


def test_a_search_begins_anew_and_its_suggestions_are_the_same(tmp_path):
    with running_code("t1"):
        store, search, driver = searching(tmp_path)
        driver.run()
        search.finish()
        before = history(store)
    with running_code("t2"):
        stage, found = review(tmp_path, store, SEARCH)
        assert (len(found.others), found.is_mixing) == (len(store.trial_ids()), False)
        path = store.sweep_directory("s") / "sweep.json"
        whole, forged = path.read_bytes(), read_sealed_json(path)
        del forged["search"]["trials"]
        write_sealed_json(path, forged)
        assert review(tmp_path, store, SEARCH)[1].is_mixing, "its budget is not this one"
        path.write_bytes(whole)
        assert review(tmp_path, store, SEARCH.replace("trials: 12", "trials: 30"))[1].is_mixing
        run_again(stage, found, store)
        assert history(store) == []
        assert (store.sweep_directory("s") / "other-code" / "1" / "points").is_dir()
        store, _, driver = searching(tmp_path)
        driver.run()
        assert [one[0] for one in history(store)] == [one[0] for one in before]
        assert codes(store) == {("t2", "m1")}


def test_a_search_that_is_to_go_on_mixes(tmp_path):
    with running_code("t1"):
        store, _, driver = searching(tmp_path, stop_at=8)
        driver.run()
    with running_code("t2"):
        assert review(tmp_path, store, SEARCH)[1].is_mixing


class OfOneCode(StubRun):
    """Workers that may run the code of the driver alone; it is edited after the second trial."""

    def __call__(self, trial):
        code = this_code()._asdict()
        if len(Store(self.store).trial_ids()) == 2:
            code["training"] = "of the driver"
        return run_task(
            trial, self.store, origin=Origin(code=code), make_trainable=self.make, wait=False
        )


def test_code_that_is_edited_while_a_sweep_runs_starts_no_more_trials(tmp_path, store):
    planned, events = next_stage(tmp_path, store).plan, []
    executor = InlineExecutor(OfOneCode(store.path))
    summary = Driver(planned, store, executor, on_event=events.append).run()
    assert (summary.states["done"], summary.states["missing"], summary.exit_code) == (2, 6, 1)
    [reason] = [event.message for event in events if event.kind == "halted"]
    assert "no more trials are started: the code is not what it was" in reason
    assert drive(planned, store, StubRun(store.path)).states["done"] == 8
