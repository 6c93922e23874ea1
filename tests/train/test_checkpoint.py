"""Interrupted at any moment, in any way: the weights come out bitwise the same."""

import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from kvlab.errors import LeaseLost, Paused, Stopped, StoreError
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.train import checkpoint, loop
from kvlab.train.checkpoint import Trunk
from kvlab.train.loop import train
from kvlab.train.training_record import load_training_record
from tests.support.kill_process import die_at
from tests.support.tiny_training import dataset, experiment, model

DATA = dataset()
OF = experiment()


def run(directory, of=OF, **options):
    return train(model(of), DATA, of, seed=0, directory=directory, **options)


def stop_after(directory, steps, of=OF, train=run, *arguments, **options):
    """Runs until ``steps`` more steps are done."""
    calls = iter(range(1, 1000))
    with pytest.raises(Stopped):
        train(directory, of, *arguments, should_stop=lambda: next(calls) == steps, **options)


def assert_same_training(record, directory, expected_record, expected_directory):
    weights, expected = (
        load_file(d / "final" / "model.safetensors") for d in (directory, expected_directory)
    )
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name
    assert record.train_curve == expected_record.train_curve
    assert record.validation_curve == expected_record.validation_curve


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    torch.set_num_threads(1)
    return run(directory), directory


def test_stopped_at_random_steps_it_ends_bitwise_the_same(tmp_path, whole):
    rng, position, stops = random.Random(0), 0, []
    while position + (step := rng.randint(1, 9)) < OF.training.steps:
        stop_after(tmp_path, step)
        position += step
        stops.append(position)
        assert (tmp_path / "checkpoints" / f"step-{position:08d}").is_dir()
        assert len(list((tmp_path / "checkpoints").iterdir())) <= 2
    record = run(tmp_path)
    assert record.resumed_from == stops
    assert_same_training(record, tmp_path, *whole)
    assert record.steps == OF.training.steps
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {
            "training": {"precision": "bfloat16"},
            "model": {"n_kv_head": 1, "position": "rope", "attention_pattern": "GL", "window": 5},
        },
        {"training": {"kv_dtype": "int4", "kv_group": 4}},
    ],
)
def test_other_recipes_resume_bitwise_too(tmp_path, changes):
    check_resumed(tmp_path, changes)


def check_resumed(tmp_path, changes):
    of = experiment(**changes)
    record = run(tmp_path / "whole", of)
    stop_after(tmp_path / "parts", 7, of)
    assert_same_training(
        run(tmp_path / "parts", of), tmp_path / "parts", record, tmp_path / "whole"
    )


@pytest.mark.parametrize("damage", ["flip", "gone", "state", "old state", "all"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path, whole, damage, caplog):
    stop_after(tmp_path, 10)  # leaves steps 8 and 10
    newest = tmp_path / "checkpoints" / "step-00000010"
    weights, state = newest / "model.safetensors", newest / "state.json"
    if damage == "flip":
        raw = bytearray(weights.read_bytes())
        raw[-5] ^= 1
        weights.write_bytes(raw)
    elif damage == "gone":
        (newest / "optimizer.safetensors").unlink()
    elif damage == "state":
        state.write_text(state.read_text()[:50])
    elif damage == "all":
        for each in tmp_path.glob("checkpoints/*/state.json"):
            each.write_text("")
    else:
        state.write_text(state.read_text().replace('"losses"', '"older"'))
    record = run(tmp_path)
    assert record.resumed_from == ([] if damage == "all" else [8])
    assert f"moved to {tmp_path / 'damaged' / '1'}" in caplog.text
    assert (tmp_path / "damaged" / "1" / "checkpoints" / newest.name / "state.json").exists()
    assert_same_training(record, tmp_path, *whole)


@pytest.fixture
def _in_background(monkeypatch):
    """Checkpoints are written from a thread, as beside a GPU."""
    monkeypatch.setattr(loop, "BACKGROUND_DEVICES", {"cpu"})


@pytest.mark.usefixtures("_in_background")
def test_a_thread_writes_what_the_weights_were_while_they_change(tmp_path, whole, monkeypatch):
    """The checkpoint of step 4 is held up until step 7, and resumed from: bitwise the same."""
    may_write, steps, threads = threading.Event(), iter(range(1, 100)), set()
    write = checkpoint.write_tensors

    def write_late(*arguments):
        assert may_write.wait(60)
        threads.add(threading.current_thread().name)
        write(*arguments)

    def should_stop():
        if next(steps) < 7:
            assert not list(tmp_path.glob("checkpoints/step-*"))
            return False
        may_write.set()
        return True

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", write_late)
        with pytest.raises(Stopped):
            run(tmp_path, should_stop=should_stop)
    assert not any(name == "MainThread" for name in threads)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000007"], "the stop waited for both"
    shutil.rmtree(tmp_path / "checkpoints" / names[1])
    record = run(tmp_path)
    assert record.resumed_from == [4]
    assert_same_training(record, tmp_path, *whole)
    assert record.checkpoint_seconds > 0


@pytest.mark.usefixtures("_in_background")
def test_what_keeps_a_thread_from_writing_ends_the_training(tmp_path, monkeypatch):
    """At step 4 the disk is full. The next steps are free to see it, and the next save has to."""

    def fail(path, *_):
        raise StoreError(f"{path} cannot be written: no space")

    monkeypatch.setattr(checkpoint, "write_tensors", fail)
    steps = []
    with pytest.raises(StoreError, match="step-00000004/model.safetensors|no space"):
        run(tmp_path, should_stop=lambda: steps.append(1))
    assert 4 <= len(steps) <= 8
    assert not list(tmp_path.glob("checkpoints/*"))
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint")]


@pytest.mark.usefixtures("_in_background")
def test_a_rung_and_a_trunk_wait_for_their_checkpoint(tmp_path):
    with pytest.raises(Paused):
        run_budget(tmp_path / "store" / "long", wsd(30), [8], until=9)
    trunk = tmp_path / "store" / "trunk" / "step-00000008"
    assert checkpoint.read_checkpoint(trunk)["state"]["step"] == 8
    assert (tmp_path / "store" / "long" / "checkpoints" / "step-00000009").is_dir()


@pytest.mark.parametrize(
    ("seconds", "shared", "expected"), [(0, [], [4, 8, 12, 16]), (60, [6], [4, 6, 13])]
)
def test_without_a_number_of_steps_time_parts_checkpoints(
    tmp_path, monkeypatch, seconds, shared, expected
):
    """A step takes three minutes here, so a checkpoint is due 4 steps after the last. If writing it
    takes a minute, 20 minutes part checkpoints. One that others branch from is always written."""
    saved, now = [], [0.0]

    def save(_self, _model, _optimizer, state):
        saved.append(state.step)
        now[0] += seconds

    def take_three_minutes():
        now[0] += 180.0

    monkeypatch.setattr(checkpoint.Checkpoints, "save", save)
    monkeypatch.setattr(checkpoint.Checkpoints, "share", lambda *_: None)
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(loop, "time", clock)
    of = experiment(training={"checkpoint_every": None, "tokens": 64 * 18})
    trunk = Trunk(tmp_path / "trunk", frozenset(shared))
    record = run(tmp_path, of, should_stop=take_three_minutes, trunk=trunk)
    assert saved == expected
    assert record.checkpoint_seconds == seconds * len(saved)


def child(directory, started, fatal_sync, is_background):
    torch.set_num_threads(1)
    if is_background:
        loop.BACKGROUND_DEVICES = {"cpu"}
    if fatal_sync:
        die_at(2 * fatal_sync - 1, ("fsync",))
    run(directory, on_progress=lambda _: started.set())


@pytest.mark.faults
@pytest.mark.parametrize("is_background", [False, True])
def test_killed_at_random_moments_it_ends_bitwise_the_same(tmp_path, whole, is_background):
    """Real kills of real processes: half of them at any time, half while one writes a checkpoint
    or the weights, whose files are synced one by one."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["kvlab.train.loop", "torch._dynamo"])  # seconds each
    rng, aims, kills, unfinished = random.Random(3), random.Random(4), 0, 0
    while load_training_record(tmp_path) is None or kills < 12:
        if load_training_record(tmp_path) is not None:  # whole too soon: the rest on a new training
            assert_same_training(run(tmp_path), tmp_path, *whole)
            shutil.rmtree(tmp_path)
        started, aim = processes.Event(), aims.randint(1, 12) if kills % 2 else None
        process = processes.Process(target=child, args=(tmp_path, started, aim, is_background))
        process.start()
        if aim is None:
            assert started.wait(60), "the child failed"
            time.sleep(rng.uniform(0.0, 0.08))
            process.kill()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL), "the child failed"
        kills += process.exitcode != 0
        unfinished += any(tmp_path.glob("checkpoints/.step-*"))
    assert unfinished >= 2
    assert_same_training(run(tmp_path), tmp_path, *whole)
    assert [path.name for path in (tmp_path / "final").iterdir()] == ["model.safetensors"]


def read_rungs(directory):
    return read_sealed_json(directory / "rungs.json")["rungs"]


def test_paused_at_rungs_it_ends_bitwise_the_same(tmp_path, whole):
    """Rungs between validation losses add none to the curve, and those at one take it."""
    rungs = (2, 10, 23)
    for rung in rungs:
        found = []
        for _ in range(2):  # also asked for twice, as after a kill
            with pytest.raises(Paused):
                run(tmp_path, until=rung)
            found.append(read_rungs(tmp_path))
        assert found[0] == found[1]
        assert (tmp_path / "checkpoints" / f"step-{rung:08d}").is_dir()
    found = read_rungs(tmp_path)
    assert [found[str(rung)]["step"] for rung in rungs] == list(rungs)
    with pytest.raises(Paused):
        run(tmp_path, until=22)  # which was passed: it is taken where the training stands
    assert read_rungs(tmp_path)["22"] == {"step": 23, "loss": found["23"]["loss"]}
    record = run(tmp_path)
    assert_same_training(record, tmp_path, *whole)
    curve = {step: loss for step, _, loss in record.validation_curve}
    assert curve[10] == found["10"]["loss"]
    assert 2 not in curve


def wsd(steps, **training):
    """Warm up for 4 steps, stay, decay over the last 6."""
    recipe = {"schedule": "wsd", "warmup_tokens": 256, "decay_tokens": 384, "tokens": 64 * steps}
    return experiment(training={**recipe, **training})


def run_budget(directory, of, shared_steps=(), **options):
    """Train one token budget, with the trunk of its store."""
    trunk = Trunk(directory.parent / "trunk", frozenset(shared_steps))
    return run(directory, of, trunk=trunk, **options)


def test_token_budgets_branch_from_one_stable_phase_bitwise_as_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.train.training_record.CURVE_POINTS", 5)  # others for each budget
    order, records = (14, 30, 20), {}
    for steps in order:
        directory = tmp_path / "store" / str(steps)
        records[steps] = run_budget(directory, wsd(steps), [8, 14, 24])
    for steps in order:
        alone = run(tmp_path / f"alone{steps}", wsd(steps))
        directory = tmp_path / "store" / str(steps)
        assert_same_training(records[steps], directory, alone, tmp_path / f"alone{steps}")
        assert alone.branched_at is None
    branched = [records[steps].branched_at for steps in order]
    assert branched == [None, 8, 14], "at the newest checkpoint that is its own too"
    assert sorted(path.name for path in (tmp_path / "store" / "trunk").iterdir()) == [
        "step-00000008", "step-00000014", "step-00000024",
    ]  # fmt: skip


def test_a_branch_that_is_killed_and_resumed_ends_bitwise_the_same(tmp_path):
    """Stopped before, at and after the branch point, in the trunk and in the branch."""
    long, short = tmp_path / "store" / "long", tmp_path / "store" / "short"
    for steps in (3, 5, 4):
        stop_after(long, steps, wsd(30), run_budget, [8])
        if steps == 3:
            assert not (tmp_path / "store" / "trunk").exists()
    assert (tmp_path / "store" / "trunk" / "step-00000008").is_dir()
    shutil.rmtree(tmp_path / "store" / "trunk")
    stop_after(short, 1, wsd(14), run_budget, [8])  # the trunk is gone: it trains the steps itself
    record = run_budget(short, wsd(14), [8])
    assert (record.branched_at, record.resumed_from) == (None, [1])
    other = tmp_path / "store" / "other"
    stop_after(other, 1, wsd(18), run_budget)
    resumed = run_budget(other, wsd(18))
    assert (resumed.branched_at, resumed.resumed_from) == (8, [8, 9])
    for steps, directory, one in ((14, short, record), (18, other, resumed)):
        alone = tmp_path / f"alone{steps}"
        assert_same_training(one, directory, run(alone, wsd(steps)), alone)


def test_the_record_names_all_code_that_took_its_steps(tmp_path):
    """Also the code that was stopped, and that of the stable phase that it branches from."""
    long, short = tmp_path / "store" / "long", tmp_path / "store" / "short"
    stop_after(long, 10, wsd(30), run_budget, [8], code=["a"])
    assert run_budget(short, wsd(14), code=["b"]).code == ["a", "b"]
    assert run_budget(long, wsd(30), [8], code=["a"]).code == ["a"]
    assert load_training_record(long).code == ["a"]
    state = short.parent / "old" / "checkpoints" / "step-00000001" / "state.json"
    stop_after(state.parents[2], 1, wsd(14), code=["a"])
    content = read_sealed_json(state)
    del content["state"]["code"]  # as before the code was noted
    write_sealed_json(state, content)
    assert run(state.parents[2], wsd(14), code=["b"]).code == ["", "b"]


def test_a_kill_between_a_checkpoint_and_the_trunk_loses_neither(tmp_path, monkeypatch):
    long = tmp_path / "store" / "long"
    with monkeypatch.context() as patch:
        patch.setattr("kvlab.train.checkpoint.Checkpoints.share", None)
        with pytest.raises(TypeError):
            run_budget(long, wsd(30), [8])
    assert (long / "checkpoints" / "step-00000008").is_dir()
    assert not (tmp_path / "store" / "trunk").exists()
    run_budget(long, wsd(30), [8])
    assert (tmp_path / "store" / "trunk" / "step-00000008").is_dir()


def test_of_two_trainings_that_share_a_step_at_once_the_first_stays(tmp_path, monkeypatch):
    first = tmp_path / "store" / "trunk" / "step-00000008" / "of-another"

    def link_late(source, target):
        first.parent.mkdir(parents=True, exist_ok=True)
        first.touch()
        shutil.copy2(source, target)

    monkeypatch.setattr("kvlab.train.checkpoint._link_or_copy", link_late)
    run_budget(tmp_path / "store" / "long", wsd(14), [8])
    assert [path.name for path in first.parent.iterdir()] == ["of-another"]
    assert [path.name for path in (tmp_path / "store" / "trunk").iterdir()] == ["step-00000008"]


def test_a_process_that_has_lost_its_lock_adds_nothing_to_a_trunk(tmp_path):
    stop_after(tmp_path, 8, wsd(30))
    fence, trunk = Mock(**{"check.side_effect": LeaseLost("taken over")}), Trunk(tmp_path / "trunk")
    with pytest.raises(LeaseLost):
        checkpoint.Checkpoints(tmp_path, "", fence, is_background=False).share(8, trunk)
    assert not trunk.path(8).exists()


def test_a_damaged_trunk_is_not_used(tmp_path, caplog):
    run_budget(tmp_path / "store" / "long", wsd(30), [8])
    weights = tmp_path / "store" / "trunk" / "step-00000008" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    record = run_budget(tmp_path / "store" / "short", wsd(14))
    assert "model.safetensors is damaged" in caplog.text
    assert (tmp_path / "store" / "trunk" / "damaged" / "1" / "step-00000008").exists()
    assert (record.branched_at, record.steps) == (None, 14)
