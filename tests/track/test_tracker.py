"""MLflow as a projection of the record: complete, idempotent, rebuilt alike, repaired."""

import json
import math
import re
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvlab.cli.main import main
from kvlab.errors import TrackingError, UsageError
from kvlab.humanize import sanitize_text
from kvlab.report.formatting import round_to_shared_digits
from kvlab.store import Store
from kvlab.track import Tracker
from kvlab.track.run_description import MAX_CURVE_POINTS, describe_run, flatten_settings, truncate
from tests.report.test_escaping import HOSTILE
from tests.support.golden import check_golden
from tests.support.mlflow_contents import read_contents as mlflow_contents
from tests.support.mlflow_contents import store_client, store_runs
from tests.support.record_factory import Record
from tests.support.terminal import Terminal

OF_THE_MACHINE = ("kvlab.digest", "kvlab.report.digest", "kvlab.store", "mlflow.user")
GOLDEN = Path(__file__).with_name("golden_runs.json")
HEADS = {"heads": ("mha", "mqa")}
SMALL = {**HEADS, "sharing": ("none", "tied")}


def small(**changes) -> Record:
    return Record(**{"factors": SMALL, "seeds": (0, 1), "items": 5, **changes})


def read_contents(store: Path):
    return mlflow_contents(f"sqlite:///{store}/mlflow.db", "made")


def database(store: Path) -> list[str]:
    """Every row of every table."""
    with sqlite3.connect(store / "mlflow.db") as connection:
        return sorted(connection.iterdump())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store with its report, mirrored once; tests that change it copy it."""
    home = tmp_path_factory.mktemp("made")
    store, report = home / "store", home / "report"
    small().write(store)
    (report / "figures").mkdir(parents=True)
    (report / "report.md").write_text("# made")
    (report / "figures" / "pareto.svg").write_text("<svg/>")
    mirrored = Tracker(store).mirror("made", report)
    assert (mirrored.written, mirrored.unchanged, mirrored.deleted) == (8, 0, 0)
    return store, report


@pytest.fixture(scope="module")
def runs(made):
    return read_contents(made[0])


@pytest.fixture
def copy(made, tmp_path):
    """The mirrored store again, free to be changed. Its artifacts stay where they were."""
    shutil.copytree(made[0], tmp_path / "store")
    return tmp_path / "store"


def test_a_terminal_shows_how_far_a_sync_is(tmp_path, monkeypatch):
    store = small().write(tmp_path)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert main(["sync", "--no-report", "--store", str(store.path)]) == 0
    said = re.sub(r"[\r\x1b]|\[K", " ", terminal.getvalue()).split("  ")
    runs = [f"made: run {number} of 8" for number in range(1, 9)]
    assert [line.strip() for line in said if line.strip()] == ["made: reading the record", *runs]
    assert terminal.getvalue().endswith("\r\x1b[K\r"), "the line is empty again"


def test_what_a_run_and_its_parent_hold(runs):
    """`golden_runs.json`, written again by KVLAB_WRITE_GOLDEN=1; review its diff."""
    assert len(runs) == 1 + 8
    shown = {}
    for name in ("made", "mqa+tied seed 1"):
        info, params, history, tags, files, datasets = runs[name]
        tags = {k: v for k, v in tags.items() if k not in OF_THE_MACHINE}
        parts = {"params": params, "metrics": history, "tags": tags, "datasets": datasets}
        shown[name] = {"info": info, **parts, "files": sorted(files)}
    rounded = json.loads(
        json.dumps(shown), parse_float=lambda one: round_to_shared_digits(float(one))
    )
    text = json.dumps(rounded, indent=1, sort_keys=True)
    check_golden(GOLDEN, f"{text}\n", "KVLAB_WRITE_GOLDEN")


def test_mirroring_twice_changes_nothing_at_all(made, monkeypatch):
    store, report = made
    before = database(store)
    # What a shell may hold must not lead the runs astray.
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "other")
    tracker = Tracker(store)
    mirrored = tracker.mirror("made", report)
    assert (mirrored.written, mirrored.unchanged, mirrored.deleted) == (0, 8, 0)
    for levels in ({"heads": "mha", "sharing": "none"}, {"heads": "mqa", "sharing": "tied"}):
        tracker.mirror_trial("made", small().trial(levels, 0))
    assert database(store) == before


def test_results_that_change_or_go_take_their_runs_along_and_no_others(copy):
    client = store_client(copy)
    experiment = client.get_experiment_by_name("made").experiment_id
    foreign = client.create_run(experiment, 1, {"kvlab.store": "another"}, "theirs").info.run_id
    record, levels = small(), {"heads": "mqa", "sharing": "none"}
    result = record.result(levels, 0, "done")
    result["measurements"]["loss"] = 1.25
    Store(copy).archive_result(result["trial"])
    Store(copy).write_result(result)
    (copy / "trials" / record.trial(levels, 1) / "result.json").unlink()
    client.delete_experiment(experiment)  # it comes back
    mirrored = Tracker(copy).mirror("made")
    assert (mirrored.written, mirrored.deleted) == (1, 1)
    assert client.get_experiment(experiment).lifecycle_stage == "active"
    assert client.get_run(foreign).info.status == "RUNNING"
    client.delete_run(foreign)
    found = read_contents(copy)
    assert [value for value, _, _ in found["mqa seed 0"][2]["quality/loss"]] == [1.25]
    assert "mqa seed 1" not in found
    assert found["made"][0][0] == "KILLED"
    assert found["made"][3]["kvlab.states"] == "7 done, 1 missing"


def damage_database(store, *statements):
    with closing(sqlite3.connect(store / "mlflow.db")) as database, database:
        database.execute("PRAGMA ignore_check_constraints = ON")
        for statement in statements:
            assert database.execute(statement).rowcount > 0


def test_runs_that_are_not_as_described_are_made_anew(copy, runs):
    """Half made or begun twice, as after a kill; or with other numbers, in a damaged database."""
    client = store_client(copy)
    found = {run.info.run_name: run for run in store_runs(copy)}
    ids = {name: run.info.run_id for name, run in found.items()}
    client.delete_tag(ids["tied seed 0"], "kvlab.digest")
    client.update_run(ids["tied seed 0"], "RUNNING")
    twice = found["tied seed 1"]
    tags = {k: v for k, v in twice.data.tags.items() if k != "kvlab.digest"}
    client.create_run(twice.info.experiment_id, twice.info.start_time, tags, twice.info.run_name)
    damage_database(
        copy,
        "UPDATE latest_metrics SET value = value + 1 WHERE key = 'quality/loss'"
        f" AND run_uuid = '{ids['mqa seed 0']}'",
        f"DELETE FROM latest_metrics WHERE run_uuid = '{ids['mqa seed 1']}'",
        "UPDATE params SET value = 'mqb' WHERE key = 'heads'"
        f" AND run_uuid = '{ids['baseline seed 0']}'",
        f"UPDATE runs SET status = 'FINISHEE' WHERE run_uuid = '{ids['baseline seed 1']}'",
    )
    assert Tracker(copy).mirror("made").written == 5
    assert read_contents(copy) == runs
    assert len(store_runs(copy)) == 9


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE runs SET start_time = NULL",
        "UPDATE tags SET value = CAST(x'ff00' AS TEXT) WHERE key = 'kvlab.sweep'",
        "UPDATE latest_metrics SET value = 'x'",
        "UPDATE latest_metrics SET key = x'00' WHERE key = 'quality/loss'",
        "UPDATE params SET key = x'00' WHERE key = 'heads'",
    ],
)
def test_a_damaged_database_is_said_so(copy, statement):
    damage_database(copy, statement)
    with pytest.raises(TrackingError, match="`kvlab sync --rebuild`"):
        Tracker(copy).mirror("made")


def test_a_damaged_database_is_set_aside_and_made_again(copy, runs, capsys):
    (copy / "mlflow.db").write_bytes(b"no database")
    (copy / "tracking.id").unlink()
    (copy / "tracking.id").mkdir()
    assert main(["sync", "--rebuild", "--no-report", "--store", str(copy)]) == 0
    assert f"is in {copy / 'damaged' / '1'} now" in capsys.readouterr().err
    assert (copy / "damaged" / "1" / "mlflow.db").read_bytes() == b"no database"
    assert read_contents(copy).keys() == runs.keys()
    elsewhere = ["sync", "--rebuild", "--tracking-uri", "http://localhost:1", "--store", str(copy)]
    assert main(elsewhere) == 2
    nowhere = copy / "nowhere"
    assert main(["sync", "--rebuild", "--store", str(nowhere)]) == 2, "there is none"
    assert not nowhere.exists()


def make_odd(result, _levels, _seed):
    """Put half a character into the settings."""
    result["experiment"]["data"] |= {"source": "a\ud800", "paths": ["b\udc80.txt"]}


def test_failures_and_text_that_no_database_takes(tmp_path):
    """Half a character, a zero, a text that reads backwards: as reports show them."""
    record = Record(change=make_odd,
        factors={"heads": ("mha", "mqa\ud800\x00")}, seeds=(0,), question="Why\udfff?" + "q" * 20_000,
        status=lambda levels, _: "diverged" if levels["heads"] == "mha" else "failed",
        error=HOSTILE + "\ud800\x00" + "x" * 20_000,
    )  # fmt: skip
    store = record.write(tmp_path / "store")
    failed, diverged = (record.trial(levels, 0) for levels in reversed(record.cells()))
    attempt = store.attempt_directory(failed, 1)
    attempt.mkdir(parents=True)
    (attempt / "traceback.txt").write_text("Traceback")
    tracker = Tracker(store.path)
    tracker.mirror_trial("made", failed)
    tracker.mirror_trial("made", diverged)
    assert tracker.mirror("made").written == 0, "they are up to date"
    runs = read_contents(store.path)
    assert runs["made"][0][0] == runs["baseline seed 0"][0][0] == "FAILED"
    assert runs["made"][3]["mlflow.note.content"].startswith("Why\\udfff?")
    assert runs["baseline seed 0"][3]["kvlab.status"] == "diverged"
    _, params, history, tags, files, _ = runs["mqa\\ud800\\x00 seed 0"]
    assert tags["kvlab.status"] == "failed"
    assert tags["kvlab.error.message"].startswith(sanitize_text(HOSTILE) + "\\ud800\\x00xxx")
    assert "sha256:" in tags["kvlab.error.message"]
    assert (params["heads"], params["data.source"]) == ("mqa\\ud800\\x00", "a\\ud800")
    assert "quality/loss" not in history
    assert "attempts/1/traceback.txt" in files


def test_a_trial_of_two_sweeps_is_in_both(tmp_path):
    store = Record(factors=HEADS, seeds=(0,)).write(tmp_path / "store")
    other = {**store.sweep("made"), "name": "other", "question": "Again?"}
    other["cells"] = other["cells"][:1]
    store.write_sweep(other)
    tracker = Tracker(store.path)
    assert (tracker.mirror("made").written, tracker.mirror("other").written) == (2, 1)
    made, others = (
        {run.data.tags.get("kvlab.trial") for run in store_runs(store.path, name)} - {None}
        for name in ("made", "other")
    )
    assert len(others) == 1
    assert others < made


def test_errors_have_a_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackingError, match="kvlab sync") as caught:
        Tracker(tmp_path, "http://user:secret@127.0.0.1:9")
    assert "secret" not in str(caught.value)
    (tmp_path / "mlflow.db").write_text("not a database, but long enough to look at" * 50)
    with pytest.raises(TrackingError, match="kvlab sync --rebuild"):
        Tracker(tmp_path)
    with pytest.raises(TrackingError, match="sqlite:///"):
        Tracker(tmp_path, "ftp://nowhere")
    for folder in ("mlruns", "file:///somewhere/mlruns"):
        with pytest.raises(UsageError, match=f"--tracking-uri = {folder} names a folder"):
            Tracker(tmp_path, folder)


@pytest.mark.parametrize("target", ["/dev/zero", ".", None])
def test_what_is_no_id_of_the_store_is_an_outage(tmp_path, target):
    """A submit goes on without MLflow: reading it must neither hang nor end the command."""
    if target is None:
        (tmp_path / "tracking.id").write_text("0" * 31)
    else:
        (tmp_path / "tracking.id").symlink_to(target)
    with pytest.raises(TrackingError, match="`kvlab sync --rebuild` makes it anew"):
        Tracker(tmp_path)


def test_a_curve_is_thinned_has_a_step_once_and_no_losses_that_are_no_numbers():
    record = Record(factors=SMALL, seeds=(0,), points=5)
    levels = {"heads": "mqa", "sharing": "none"}
    result = record.result(levels, 0, "done")
    result["curves"]["train_loss"] = [[step, step, 9.0 - step / 1e4] for step in range(1, 10_001)]
    *_, again, last = result["curves"]["validation_loss"]
    last[2] = float("nan")
    result["curves"]["validation_loss"] += [[*again[:2], 7.5]]  # a step since the last checkpoint
    run = describe_run(record.description(record.cells()), levels, result, Path())
    steps = [step for name, _, _, step in run.points if name == "train/loss"]
    assert (len(steps), steps[0], steps[-1]) == (MAX_CURVE_POINTS, 1, 10_000)
    validation = [value for name, value, _, _ in run.points if name == "train/validation_loss"]
    assert len(validation) == record.points - 1
    assert validation[-1] == 7.5, "after a kill the later value of a step holds"
    assert all(math.isfinite(value) for _, value, _, _ in run.points)


def test_settings_are_flat_and_long_values_cut_with_a_hash():
    assert truncate("x" * 6000, 6000) == "x" * 6000
    one, other = truncate("x" * 6001, 6000), truncate("x" * 6002, 6000)
    assert len(one) == len(other) == 6000
    assert one != other
    settings = {"a": {"b": [1, {"c": None}], "d": "text"}, "e": True}
    found = dict(flatten_settings(settings))
    assert found == {"a.b": '[1, {"c": null}]', "a.d": "text", "e": "true"}
