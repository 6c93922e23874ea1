"""The record of a sweep in one file, here and at a URL: whole, and back again, whatever breaks."""

import shutil
from pathlib import Path

import fsspec
import pytest

from kvlab.errors import CopyDamaged, CopyError, RecordDamaged, UsageError
from kvlab.extensions.copy.record_copies import (
    check_place,
    copy_sweep,
    fetch_archive,
    list_archives,
    restore_archive,
)
from kvlab.fs.sealed_files import read_sealed_json, seal_file, write_sealed_json
from kvlab.store import Store
from kvlab.store.record_archive import extract_archive
from kvlab.store.verification import verify_record
from kvlab.sweep import Driver
from kvlab.sweep.executors.inline import InlineExecutor
from kvlab.sweep.planning.planner import describe_sweep
from tests.support.stub_trials import StubRun, tiny_plan

URL = "memory://bucket/kvlab"


@pytest.fixture(autouse=True)
def memory():
    """The file system of `URL`, empty."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    return memory


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


@pytest.fixture
def copied(store):
    """The store, after its sweep was copied to `URL` with its weights."""
    copy_sweep(store, "s", URL, weights=True)
    return store


def contents(store):
    """Path -> bytes of all that counts."""
    return {
        path.relative_to(store.path).as_posix(): path.read_bytes()
        for path in sorted(store.path.rglob("*"))
        if path.is_file() and not path.name.startswith(("lock.", "checkpoint", "steps.log"))
    }


def restore(store, place, folder):
    folder.mkdir()
    archive = extract_archive(fetch_archive(place, folder), folder / "record")
    return restore_archive(store, archive)


@pytest.mark.parametrize("place", [URL, "file"])
def test_there_and_back_it_is_the_same(store, tmp_path, place):
    place = f"file://{tmp_path}/copy" if place == "file" else place
    store.note_report("s", [0])  # by which seeds that are added later are recognized
    copied = copy_sweep(store, "s", place, weights=True)
    assert (copied.trials, copied.unchanged, copied.missing) == (8, 0, 0)
    assert list_archives(place) == [f"{place}/s.tar.xz"]
    back = Store(tmp_path / "back")
    summary = restore(back, f"{place}/s.tar.xz", tmp_path / "work")
    assert (summary.trials, summary.missing) == (8, 0)
    without_attempts = {k: v for k, v in contents(store).items() if "/attempts/" not in k}
    assert contents(back) == without_attempts
    assert all(back.is_trained(back.result(t)["training"]) for t in back.trial_ids())
    assert [back.status(t) for t in back.trial_ids()].count("failed") == 1
    assert not verify_record(back).damaged


def test_without_being_asked_for_weights_stay_here_and_damaged_ones_are_not_copied(store, tmp_path):
    place, back = str(tmp_path / "s.tar.xz"), Store(tmp_path / "back")
    copy_sweep(store, "s", place)
    restore(back, place, tmp_path / "work")
    trainings = [back.result(trial)["training"] for trial in back.trial_ids()]
    assert not any(map(back.is_trained, trainings))
    copy_sweep(store, "s", place, weights=True)
    summary = restore(back, place, tmp_path / "again")
    assert (summary.trials, summary.unchanged) == (0, 8)
    assert all(map(back.is_trained, trainings))
    weights = store.training_directory(trainings[0]) / "final" / "model.safetensors"
    weights.write_bytes(b"x" + weights.read_bytes()[1:])
    copy_sweep(store, "s", place)
    with pytest.raises(RecordDamaged, match="`kvlab verify --heal` moves it aside"):
        copy_sweep(store, "s", place, weights=True)


def test_an_outage_leaves_the_earlier_copy_and_another_is_refused(
    copied, tmp_path, memory, monkeypatch
):
    def fail(_self, lpath, rpath, **_options):
        memory.pipe_file(rpath, Path(lpath).read_bytes()[:100])
        raise ConnectionResetError("the line is dead")

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "put_file", fail)
        with pytest.raises(CopyError, match="cannot be used: ConnectionResetError: the line is"):
            copy_sweep(copied, "s", URL)
    assert restore(Store(tmp_path / "back"), f"{URL}/s.tar.xz", tmp_path / "work").trials == 8
    data = memory.cat_file("/bucket/kvlab/s.tar.xz")
    memory.pipe_file("/bucket/kvlab/s.tar.xz", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CopyDamaged, match="does not have the sha256 that is written beside it"):
        fetch_archive(f"{URL}/s.tar.xz", tmp_path)
    memory.rm_file("/bucket/kvlab/s.tar.xz.sha256")
    with pytest.raises(CopyError, match="FileNotFoundError"):
        fetch_archive(f"{URL}/s.tar.xz", tmp_path)


def test_what_the_store_has_stays_and_what_is_damaged_is_replaced(copied, tmp_path):
    store = copied
    kept, lost, cut = store.trial_ids()[:3]
    path, *others = (store.trial_directory(t) / "result.json" for t in (kept, lost, cut))
    write_sealed_json(path, {**store.result(kept), "seed": 77})
    others[0].unlink()
    others[1].write_text("{")
    training = store.read_training_id(kept)
    weights = store.training_directory(training) / "final" / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(b"x" + before[1:])
    description = store.sweep_directory("s") / "sweep.json"
    description.write_bytes(description.read_bytes()[:-9])
    summary = restore(store, f"{URL}/s.tar.xz", tmp_path / "work")
    assert store.result(kept)["seed"] == 77
    assert (summary.trials, summary.unchanged) == (2, 6)
    assert {store.status(lost), store.status(cut)} <= {"done", "failed"}
    assert weights.read_bytes() == before
    assert verify_record(store).damaged == []


def test_what_a_process_works_on_is_left_alone_and_links_lead_nowhere(copied, tmp_path):
    back, outside = Store(tmp_path / "back"), tmp_path / "outside"
    outside.mkdir()
    with back.trial_lock(copied.trial_ids()[0]).hold():
        assert restore(back, f"{URL}/s.tar.xz", tmp_path / "a").in_use == 1
    with back.driver_lock("s").hold(), pytest.raises(UsageError, match="is being run in"):
        restore(back, f"{URL}/s.tar.xz", tmp_path / "b")
    linked = Store(tmp_path / "linked")
    folder = linked.training_directory(copied.read_training_id(copied.trial_ids()[0]))
    folder.mkdir(parents=True)
    (folder / "final").symlink_to(outside)
    with pytest.raises(CopyError, match="behind a symbolic link"):
        restore(linked, f"{URL}/s.tar.xz", tmp_path / "c")
    assert list(outside.iterdir()) == []


def test_a_stable_phase_comes_back_for_trials_that_are_missing(store, tmp_path):
    """A machine that dies takes the phase that its token budgets were to branch from."""
    trials, trunk = store.trial_ids(), "f" * 16
    path = store.trial_directory(trials[0]) / "trial.json"
    write_sealed_json(path, {**read_sealed_json(path), "trunk": trunk})
    for step in (4, 8):
        folder = store.trunk_directory(trunk) / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(f"weights after {step} steps")
        files = {"model.safetensors": seal_file(folder / "model.safetensors")}
        write_sealed_json(folder / "state.json", {"files": files, "state": {"step": step}})
    shutil.rmtree(store.trial_directory(trials[-1]))
    copy_sweep(store, "s", URL, weights=True)
    back = Store(tmp_path / "back")
    assert restore(back, f"{URL}/s.tar.xz", tmp_path / "work").missing == 1
    assert back.trunk_steps(trunk) == [4, 8]
    assert not verify_record(back).damaged


def test_wrong_places_are_refused_before_anything(store):
    with pytest.raises(UsageError, match="nowhere://x cannot be opened: Protocol not known"):
        check_place("nowhere://x", store)
    for place in (str(store.path / "copy"), f"file://{store.path}/copy"):
        with pytest.raises(UsageError, match="lies in the store"):
            check_place(place, store)
