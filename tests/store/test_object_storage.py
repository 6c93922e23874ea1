"""Copies of the record in object storage: whole, once, and back again, whatever breaks."""

import json
import os
import shutil
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from kvlab.errors import CopyError, UsageError
from kvlab.fs.sealed_files import read_sealed_json, seal_file, write_sealed_json
from kvlab.store import Store
from kvlab.store.object_storage import ObjectStorage, redact_url
from kvlab.store.sweep_backup import (
    check_outside_store,
    copy_sweep,
    list_copied_sweeps,
    restore_sweep,
)
from kvlab.store.verification import verify_record
from kvlab.sweep import Driver
from kvlab.sweep.executors.inline import InlineExecutor
from kvlab.sweep.planning.planner import describe_sweep
from tests.support.stub_trials import StubRun, tiny_plan


class FlakyFileSystem(MemoryFileSystem):
    """A store in memory that notes every file put, and fails when it is told to."""

    protocol = "flaky"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    puts: ClassVar[list] = []
    fails_after = None  # files
    half = False  # whether the failing put leaves half of the file

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("flaky://", "memory://"))

    def put_file(self, lpath, rpath, **options):
        if self.fails_after is not None and len(self.puts) >= self.fails_after:
            if self.half:
                data = Path(lpath).read_bytes()
                self.pipe_file(rpath, data[: len(data) // 2])
            raise ConnectionResetError("the line is dead")
        self.puts.append(rpath)
        super().put_file(lpath, rpath, **options)


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)


@pytest.fixture(autouse=True)
def flaky():
    FlakyFileSystem.store.clear()
    FlakyFileSystem.pseudo_dirs[:] = [""]
    FlakyFileSystem.puts = []
    FlakyFileSystem.fails_after, FlakyFileSystem.half = None, False
    return FlakyFileSystem


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A store with one sweep that has ended, one of its trials failed."""
    folder = tmp_path_factory.mktemp("finished")
    store = Store(folder / "runs")
    planned = tiny_plan(folder)
    script = {(planned.trials[1].trial.id, "measure", 0): "bug"}
    described = describe_sweep(planned, yaml="", experiment_yaml="", command="kvlab submit")
    run = StubRun(store.path, script=script)
    Driver(planned, store, InlineExecutor(run), description=described).run()
    return store


@pytest.fixture
def store(finished, tmp_path):
    shutil.copytree(finished.path, tmp_path / "runs")
    return Store(tmp_path / "runs")


def contents(store):
    """Path -> bytes of all that counts."""
    return {
        path.relative_to(store.path).as_posix(): path.read_bytes()
        for path in sorted(store.path.rglob("*"))
        if path.is_file() and not path.name.startswith(("lock.", "checkpoint", "steps.log"))
    }


def test_there_and_back_it_is_the_same(store, flaky, tmp_path):
    copied = copy_sweep(store, ObjectStorage("flaky://bucket/kvlab"), "s")
    assert (copied.trials, copied.unchanged, copied.missing) == (8, 0, 0)
    assert copied.files == len(flaky.puts) == len(set(flaky.puts))
    assert all(path.startswith("/bucket/kvlab/") for path in flaky.store)
    back = Store(tmp_path / "back")
    summary = restore_sweep(back, ObjectStorage("flaky://bucket/kvlab"), "s")
    assert (summary.trials, summary.missing) == (8, 0)
    assert contents(back) == contents(store)
    assert all(back.is_trained(back.result(t)["training"]) for t in back.trial_ids())
    assert [back.status(t) for t in back.trial_ids()].count("failed") == 1


def test_a_folder_does_as_well(store, tmp_path):
    store.note_report("s", [0])  # by which seeds that are added later are recognized
    copy_sweep(store, ObjectStorage(str(tmp_path / "copy")), "s")
    back = Store(tmp_path / "back")
    assert list_copied_sweeps(ObjectStorage(f"file://{tmp_path}/copy")) == ["s"]
    restore_sweep(back, ObjectStorage(f"file://{tmp_path}/copy"), "s")
    assert contents(back) == contents(store)


def test_nothing_is_copied_twice_and_what_changed_is(store, flaky):
    storage = ObjectStorage("flaky://bucket")
    copy_sweep(store, storage, "s")
    flaky.puts = []
    again = copy_sweep(store, storage, "s")
    assert (again.trials, again.files, again.unchanged) == (0, 0, 8)
    assert flaky.puts == []
    for path in store.path.rglob("*.json"):  # as new files with the same contents: a restored store
        os.utime(path, (1, 1))
    assert copy_sweep(store, storage, "s").files == 0
    trial = store.trial_ids()[0]
    path = store.trial_directory(trial) / "result.json"
    write_sealed_json(path, {**store.result(trial), "seed": 77})
    assert copy_sweep(store, storage, "s").files == 1
    assert flaky.puts == [f"/bucket/trials/{trial}/result.json"]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("after", [0, 1, 4, 11])
def test_after_an_outage_it_goes_on_and_nothing_half_is_read(store, flaky, tmp_path, half, after):
    storage = ObjectStorage("flaky://bucket")
    flaky.fails_after, flaky.half = after, half
    with pytest.raises(CopyError) as caught:
        copy_sweep(store, storage, "s")
    assert "flaky://bucket cannot be used: ConnectionResetError: the line is dead" in str(
        caught.value
    )
    before, flaky.fails_after = list(flaky.puts), None
    back = Store(tmp_path / "part")
    for trial in store.trial_ids():  # whatever is there is whole
        if storage.download(f"trials/{trial}", back.trial_directory(trial)):
            ours, restored = contents(store), contents(back)
            assert all(ours[path] == data for path, data in restored.items())
            assert back.status(trial) == store.status(trial)
    copy_sweep(store, storage, "s")
    flaky.puts = []
    assert copy_sweep(store, storage, "s").files == 0
    whole = Store(tmp_path / "whole")
    restore_sweep(whole, storage, "s")
    assert contents(whole) == contents(store)
    assert len(before) == after


def test_a_copy_that_was_damaged_there_is_refused_and_copied_anew(store, tmp_path):
    storage = ObjectStorage("flaky://bucket")
    copy_sweep(store, storage, "s")
    trial = next(t for t in store.trial_ids() if store.status(t) == "done")
    fs = fsspec.filesystem("flaky")
    fs.pipe_file(f"/bucket/trials/{trial}/result.json", b"{}")
    back = Store(tmp_path / "back")
    summary = restore_sweep(back, storage, "s")
    assert (summary.trials, len(summary.damaged)) == (7, 1)
    assert f"{trial}/result.json is not what was copied there; copy it again" in summary.damaged[0]
    assert back.status(trial) is None
    fs.pipe_file(f"/bucket/trials/{trial}/copied.json", b'{"schema": 1, "fil')
    assert copy_sweep(store, storage, "s").trials == 1
    restore_sweep(back, storage, "s")
    assert contents(back) == contents(store)


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/../../evil", "a//b", ".hidden", ""])
def test_a_list_from_elsewhere_names_no_place_outside(tmp_path, name):
    listed = {name: {"size": 1, "sha256": "0" * 64, "mtime_ns": 1}}
    fs = fsspec.filesystem("flaky")
    fs.pipe_file("/bucket/trials/x/copied.json", json.dumps({"files": listed}).encode())
    with pytest.raises(CopyError, match="which is no path in it"):
        ObjectStorage("flaky://bucket").download("trials/x", tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_what_the_store_has_stays(store):
    storage = ObjectStorage("flaky://bucket")
    copy_sweep(store, storage, "s")
    trial = store.trial_ids()[0]
    result = store.result(trial)
    write_sealed_json(store.trial_directory(trial) / "result.json", {**result, "seed": 77})
    lost = store.trial_ids()[1]
    (store.trial_directory(lost) / "result.json").unlink()
    summary = restore_sweep(store, storage, "s")
    assert store.result(trial)["seed"] == 77
    assert store.status(lost) is not None
    assert (summary.trials, summary.unchanged) == (1, 7)


def test_what_a_process_works_on_is_left_alone(store, tmp_path):
    storage = ObjectStorage("flaky://bucket")
    copy_sweep(store, storage, "s")
    back = Store(tmp_path / "back")
    with back.trial_lock(store.trial_ids()[0]).hold():
        assert restore_sweep(back, storage, "s").in_use == 1
    with back.driver_lock("s").hold(), pytest.raises(UsageError, match="is being run in"):
        restore_sweep(back, storage, "s")


def test_checkpoints_of_an_unfinished_training_come_and_go(store, flaky, tmp_path):
    storage = ObjectStorage("flaky://bucket")
    training = store.result(store.trial_ids()[0])["training"]
    directory = store.training_directory(training)
    folder = directory / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    (directory / "checkpoints" / ".step-half").mkdir()
    (directory / "checkpoints" / ".step-half" / "model.safetensors").write_text("half")
    copy_sweep(store, storage, "s")
    there = [path for path in flaky.store if "checkpoints" in path]
    assert there == [f"/bucket/trainings/{training}/checkpoints/step-00000004/state.json"]
    shutil.rmtree(directory / "checkpoints")
    copy_sweep(store, storage, "s")
    assert not [path for path in flaky.store if "checkpoints" in path]
    assert restore_sweep(Store(tmp_path / "back"), storage, "s").trials == 8


def write_trunk(store, trial, steps):
    """Write checkpoints of a stable phase that a trial shares, as a training leaves them."""
    path = store.trial_directory(trial) / "trial.json"
    content = {**read_sealed_json(path), "trunk": "f" * 16}
    write_sealed_json(path, content)
    for step in steps:
        folder = store.trunk_directory("f" * 16) / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(f"weights after {step} steps")
        files = {"model.safetensors": seal_file(folder / "model.safetensors")}
        write_sealed_json(folder / "state.json", {"files": files, "state": {"step": step}})


def test_a_stable_phase_comes_back_whole_for_trials_that_are_missing(store, tmp_path):
    """A machine that dies takes the phase that its token budgets were to branch from."""
    storage = ObjectStorage(str(tmp_path / "copy"))
    trials = store.trial_ids()
    write_trunk(store, trials[0], (4, 8, 12))
    trunk = store.trunk_directory("f" * 16)
    (trunk / "step-00000008" / "model.safetensors").write_text("weights after 9 steps")
    shutil.rmtree(store.trial_directory(trials[-1]))
    copy_sweep(store, storage, "s")
    back = Store(tmp_path / "back")
    restore_sweep(back, storage, "s")
    assert back.trunk_steps("f" * 16) == [4, 12], "a damaged checkpoint is not copied"
    assert not verify_record(back).damaged
    assert sorted(os.listdir(back.trunk_directory("f" * 16)))[1:] == [
        "step-00000004", "step-00000012"
    ]  # fmt: skip
    (tmp_path / "copy/trunks" / ("f" * 16) / "step-00000012/model.safetensors").write_text("w")
    again = Store(tmp_path / "again")
    assert "is not what was copied there" in restore_sweep(again, storage, "s").damaged[0]
    assert again.trunk_steps("f" * 16) == []


def test_damage_here_does_not_reach_the_copy(store, tmp_path):
    storage = ObjectStorage(str(tmp_path / "copy"))
    copy_sweep(store, storage, "s")
    training, collected = sorted({store.result(t)["training"] for t in store.trial_ids()})[:2]
    weights = [store.training_directory(t) / "final" / "model.safetensors"
               for t in (training, collected)]  # fmt: skip
    whole = [path.read_bytes() for path in weights]
    weights[0].write_bytes(b"x" + whole[0][1:])
    shutil.rmtree(weights[1].parent)
    summary = copy_sweep(store, storage, "s")
    assert set(summary.damaged) == {f"{weights[0]} is damaged, so it is not copied"}
    copies = [tmp_path / "copy" / path.relative_to(store.path) for path in weights]
    assert [path.read_bytes() for path in copies] == whole
    assert restore_sweep(store, storage, "s").damaged == []
    assert [path.read_bytes() for path in weights] == whole


def test_wrong_places_are_refused_before_anything(store):
    with pytest.raises(UsageError, match="nowhere://x cannot be opened: Protocol not known"):
        ObjectStorage("nowhere://x")
    with pytest.raises(UsageError, match="lies in the store"):
        check_outside_store(ObjectStorage(str(store.path / "copy")), store)
    with pytest.raises(UsageError, match=r"sweep = q is not in .* \(it has none\)"):
        restore_sweep(store, ObjectStorage("memory://nothing-here"), "q")
    assert redact_url("s3://key:secret@bucket/a?token=x") == "s3://bucket/a"
