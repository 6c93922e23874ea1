"""Reports from MLflow alone: byte for byte those of the store that was mirrored."""

import shutil

import pytest

from kvlab.cli.main import main
from kvlab.errors import StoreError, UsageError
from kvlab.report import write_report
from kvlab.store.timings import TimedTrial, TimingSession, write_timings
from kvlab.track import Tracker, fetch_record
from tests.support.mlflow_contents import read_files, store_client, store_runs
from tests.support.record_factory import Record


def status(levels, seed):
    """Some of everything that can become of a trial."""
    if levels["heads"] == "mqa" and seed == 1:
        return {"none": "failed", "trained": "diverged", "tied": "missing"}[levels["sharing"]]
    return "done"


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    """A store with a damaged result too, its report, and its MLflow, the store then removed."""
    home = tmp_path_factory.mktemp("mirrored")
    factors = {"heads": ("mha", "mqa"), "sharing": ("none", "trained", "tied")}
    record = Record(factors=factors, seeds=(0, 1), items=7, status=status)
    store = record.write(home / "store")
    damaged = record.trial({"heads": "mqa", "sharing": "trained"}, 0)
    (store.trial_directory(damaged) / "result.json").write_text('{"schema": 1, "tri')
    # The same computation answers two cells.
    sweep = store.sweep("made")
    sweep["cells"][2]["trials"] = sweep["cells"][0]["trials"]
    store.write_sweep(sweep)
    # two of the trials were timed again
    trials = [record.trial({"heads": heads, "sharing": "none"}, 0) for heads in ("mha", "mqa")]
    timed = {one: TimedTrial(store.result_seal(one), {"tpot_ms_p50": 0.125}, ()) for one in trials}
    at = ("2026-01-02T00:00:00Z", "2026-01-02T00:00:09Z")
    session = TimingSession(0, *at, "cpu", 1, None, timed)
    write_timings(store.sweep_directory("made"), [session])
    write_report(store, "made", home / "report")
    Tracker(store.path).mirror("made")
    for part in ("sweeps", "trials", "tracking.id"):
        path = store.path / part
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return home


@pytest.fixture
def uri(mirrored):
    return f"sqlite:///{mirrored}/store/mlflow.db"


def test_the_same_report_without_the_store(mirrored, uri, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "made", "--tracking-uri", uri, "--reports", "again"]) == 0
    assert read_files(tmp_path / "again") == read_files(mirrored / "report")
    text = (tmp_path / "again" / "made" / "report.md").read_text()
    assert "1 damaged, 1 diverged, 1 failed" in text
    assert not (tmp_path / "runs").exists()
    assert capsys.readouterr().err == ""


def test_times_that_were_taken_again_are_those_of_the_run_and_of_the_report(mirrored):
    runs = {run.info.run_name: run for run in store_runs(mirrored / "store")}
    run = runs["baseline seed 0"]
    assert run.data.metrics["speed/tpot_ms_p50"] == 0.125
    assert run.data.tags["kvlab.timed_again"] == "2026-01-02T00:00:09Z"
    assert runs["mqa+tied seed 0"].data.metrics["speed/tpot_ms_p50"] != 0.125
    rows = (mirrored / "report" / "made" / "results.jsonl").read_text()
    assert rows.count('"timed_again": "2026-01-02T00:00:09Z"') == 3  # of two cells it is one


@pytest.fixture
def copy(mirrored, tmp_path):
    """The mirrored store's MLflow again, free to be changed: its runs by name, client and URI."""
    shutil.copytree(mirrored / "store", tmp_path / "store")
    runs = {run.info.run_name: run for run in store_runs(tmp_path / "store")}
    return runs, store_client(tmp_path / "store"), f"sqlite:///{tmp_path}/store/mlflow.db"


def test_a_run_that_is_not_whole_is_missing_and_that_of_the_sweep_says_how_to_go_on(copy, tmp_path):
    runs, client, uri = copy
    client.delete_tag(runs["trained seed 1"].info.run_id, "kvlab.digest")
    store = fetch_record(uri, "made", tmp_path / "1")
    assert store.status(runs["trained seed 1"].data.tags["kvlab.trial"]) is None
    assert sum(store.status(t) == "done" for t in store.sweep_trials("made")) > 3
    client.delete_tag(runs["made"].info.run_id, "kvlab.digest")
    with pytest.raises(UsageError, match="no complete run; `kvlab sync made`"):
        fetch_record(uri, "made", tmp_path / "2")


def test_several_stores_on_one_server(copy, tmp_path):
    uri, other = copy[2], Record(factors={"heads": ("mha", "mqa")}, seeds=(5,))
    path = other.write(tmp_path / "other").path
    Tracker(path, uri).mirror("made")
    with pytest.raises(UsageError, match="comes from 2 stores .* name one with --mirrored-by"):
        fetch_record(uri, "made", tmp_path / "1")
    identity = (path / "tracking.id").read_text().strip()
    assert fetch_record(uri, "made", tmp_path / "2", identity[:8]).sweep("made")["seeds"] == [5]
    with pytest.raises(UsageError, match="--mirrored-by = zzz fits 0 of the stores"):
        fetch_record(uri, "made", tmp_path / "3", "zzz")


def test_what_is_not_there_is_refused(uri, tmp_path, capsys):
    with pytest.raises(UsageError, match="nosuch is not in MLflow .*(made).*kvlab sync nosuch"):
        fetch_record(uri, "nosuch", tmp_path / "1")
    absent = f"sqlite:///{tmp_path}/none.db"
    assert main(["report", "made", "--tracking-uri", absent]) == 2
    assert "is not a database" in capsys.readouterr().err
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("trial", ["../../evil", "/etc/passwd", "0123456789abcdeg"])
def test_names_from_a_server_never_become_paths(copy, tmp_path, trial):
    runs, client, uri = copy
    client.set_tag(runs["trained seed 1"].info.run_id, "kvlab.trial", trial)
    with pytest.raises((UsageError, StoreError), match="16 hex digits"):
        fetch_record(uri, "made", tmp_path / "fetched")
    assert {path.name for path in tmp_path.iterdir()} == {"store", "fetched"}
