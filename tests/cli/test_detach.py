"""`kvlab submit --detach`: a driver without a terminal, here and as a job of a cluster."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from kvlab.store import Store
from kvlab.sweep.ops.detached_driver import (
    create_driver_folder,
    driver_log,
    read_driver,
    record_driver,
)
from tests.support.ray_head import ROOT, ray_head
from tests.support.tiny_sweep import (
    EXPERIMENT,
    FAILING_SWEEP,
    SHORT_REPORT,
    run_kvlab,
    write_tiny_sweep,
)

DRIVER = """
import sys, time
from kvlab.sweep.ops.detached_driver import record_driver
from kvlab.sweep.driver.driver_registry import stop_on_signal
from kvlab.store import Store
with record_driver(Store(sys.argv[1]), "s", int(sys.argv[2]), None) as code:
    try:
        with stop_on_signal(lambda: None):  # it goes on to its next checkpoint
            print("up", flush=True)
            time.sleep(600)
    except KeyboardInterrupt:
        code.append(130)
"""
RUN_KVLAB = "import sys; from kvlab.cli.main import main; sys.exit(main(sys.argv[1:]))"
RUN_KVLAB_TWICE = """
import sys
from kvlab.cli.main import main
middle = sys.argv.index("then")
print(main(sys.argv[1:middle]))
sys.exit(main(sys.argv[middle + 1:]))
"""
LONG = EXPERIMENT.replace("tokens: 640,", "tokens: 64e5, checkpoint_every: 5,")
PATIENCE = 200.0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    for name in ("KVLAB_STORE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run_kvlab_process(*arguments):
    """As `run_kvlab` in a new process, because Ray reads the token of clusters once per process."""
    return run_python(RUN_KVLAB, *arguments)


def run_python(code, *arguments):
    words = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.05)


def test_following_the_log_of_a_detached_driver_ends_with_its_exit_code(folder, mlflow_template):
    write_tiny_sweep(folder, FAILING_SWEEP + SHORT_REPORT)
    (folder / "runs").mkdir()
    shutil.copyfile(mlflow_template(), folder / "runs" / "mlflow.db")
    code, out, _ = run_kvlab("submit", "s.yaml", "--executor", "inline", "--detach", "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["totals"].startswith("3 trials, 2 trainings")
    code, out, _ = run_kvlab("logs", "s", "-f")
    assert code == 1
    assert "2 done, 1 failed" in out
    driver = json.loads(run_kvlab("status", "s", "--json")[1])["driver"]
    ended = (driver["process"], driver["state"], driver["exit_code"])
    assert ended == (facts["process"], "ended", 1)
    shown = run_kvlab("status", "s")[1]
    assert "3 trials: 2 done, 1 failed; no driver is running" in shown
    assert f"process {facts['process']} on" in shown
    assert (folder / "reports" / "s" / "report.md").exists()


def test_an_invalid_sweep_is_refused_before_a_driver_starts(folder):
    write_tiny_sweep(folder, experiment=EXPERIMENT.replace("n_head: 2", "n_head: 3"))
    code, _, error = run_kvlab("submit", "s.yaml", "--detach")
    assert code == 2
    assert "e.yaml:2:" in error
    assert not (folder / "runs").exists()


@pytest.fixture
def driver(folder):
    """A process that is driver 1 of ``s`` and runs until it is ended, as a driver does."""
    store = Store(folder / "runs")
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, store.path, str(create_driver_folder(store, "s"))],
        cwd=ROOT,
        stdout=-1,
        text=True,
    )
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.communicate()


def test_a_killed_driver_is_reported_as_killed(folder, driver):
    assert "a driver is running" in run_kvlab("status", "s")[1]
    driver.kill()
    driver.wait(timeout=PATIENCE)
    assert read_driver(Store(folder / "runs"), "s", 1)[1] == "killed"
    shown = run_kvlab("status", "s")[1]
    assert "no driver is running" in shown
    assert "was killed; submit again to go on" in shown
    assert run_kvlab("logs", "s", "-f")[0] == 1


def test_stop_force_ends_the_driver_and_records_its_exit_code(folder, driver):
    assert run_kvlab("stop", "s", "--force")[0] == 0
    assert driver.wait(timeout=PATIENCE) == 0
    facts, state = read_driver(Store(folder / "runs"), "s", 1)
    assert (state, facts.exit_code) == ("ended", 130)
    code, _, error = run_kvlab("stop", "s", "--force")
    assert code == 2
    assert "no detached driver that runs" in error


def test_stop_force_explains_what_it_cannot_end(folder, monkeypatch):
    store = Store(folder / "runs")
    with store.driver_lock("s").hold():
        code, _, error = run_kvlab("stop", "s", "--force")
    assert code == 2
    assert f"process {os.getpid()}" in error
    assert "press Ctrl-C twice in its terminal, or run `kill PROCESS` twice" in error
    code, _, error = run_kvlab("stop", "s", "--force")
    assert (code, "nor any other; see `kvlab status s`" in error) == (2, True)
    for job, hint in ((None, "run `kvlab stop s --force` on far"),
                         ("j", "run `kvlab stop s --force --address ADDRESS`")):  # fmt: skip
        with monkeypatch.context() as there:
            there.setattr("socket.gethostname", lambda: "far")
            driver = record_driver(store, "s", create_driver_folder(store, "s"), job)
            driver.__enter__()
        code, _, error = run_kvlab("stop", "s", "--force")
        assert code == 2
        assert f"process {os.getpid()} on far, and this is" in error
        assert hint in error
        driver.__exit__(None, None, None)


def test_every_driver_has_a_log_of_its_own(folder):
    store = Store(folder / "runs")
    for text, code in (("one", 0), ("two", 1)):
        number = create_driver_folder(store, "s")
        driver_log(store, "s", number).write_text(f"{text}\n")
        with record_driver(store, "s", number, None) as codes:
            codes.append(code)
    assert run_kvlab("logs", "s") == (0, "two\n", "")
    assert run_kvlab("logs", "s", "--attempt", 1) == (0, "one\n", "")
    code, _, error = run_kvlab("logs", "s", "--attempt", 3)
    assert (code, error) == (2, "--attempt = 3 is none of the drivers of s; use one of 1, 2\n")


def test_a_cluster_needs_a_store_and_paths_that_its_machines_share(folder):
    write_tiny_sweep(folder)
    submit = ("submit", "s.yaml", "--detach", "--address", "http://127.0.0.1:1")
    code, _, error = run_kvlab(*submit)
    assert code == 2
    assert "store = runs is a folder of this machine" in error
    code, _, error = run_kvlab(*submit, "--store", "/shared/runs")
    assert code == 2
    assert "e.yaml:3:48: data.paths = ['texts'] lies on this machine" in error
    shared = ("--store", "/shared/runs", "--copy-to")
    code, _, error = run_kvlab(*submit, *shared, "copies")
    assert code == 2
    assert "--copy-to = copies is a folder of this machine" in error
    for way in ("/shared/copies", "s3://bucket/copies"):
        assert "data.paths" in run_kvlab(*submit, *shared, way)[2]  # the next thing refused


def test_paths_among_the_choices_of_a_search_must_be_shared_too(folder):
    search = """\
question: q
experiment: e.yaml
search:
  choices:
    data.paths: [[/shared/texts], [texts]]
    training.init_from: [null, ./weights]
  objectives: [loss]
  trials: 2
"""
    write_tiny_sweep(folder, search, EXPERIMENT.replace("paths: [texts]", "paths: [/shared/texts]"))
    submit = ("submit", "s.yaml", "--detach", "--address", "http://127.0.0.1:1")
    code, _, error = run_kvlab(*submit, "--store", "/shared/runs")
    assert code == 2
    first, second = error.splitlines()
    assert "s.yaml:5:35: data.paths = ['texts'] lies on this machine" in first
    assert "s.yaml:6:32: training.init_from = ./weights lies on this machine" in second


def test_a_cluster_without_a_job_server_is_refused_with_a_hint(folder):
    text = EXPERIMENT.replace("paths: [texts]", f"paths: [{folder / 'texts'}]")
    write_tiny_sweep(folder, experiment=text)
    address = ("--address", "http://127.0.0.1:1")
    submit = ("submit", "s.yaml", "--detach", "--store", folder, *address)
    # in one process: importing Ray's job client takes seconds
    code, out, error = run_python(RUN_KVLAB_TWICE, *submit, "then", "status", "s", *address)
    assert (code, out) == (2, "2\n")
    assert error.count("gives no job server") == 2
    assert "kvlab[cluster]" in error


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ray_head(dashboard=True, KVLAB_DATA=str(tmp_path_factory.mktemp("data"))) as head:
        yield head.jobs


@pytest.mark.faults
class TestJob:
    def test_status_and_logs_of_a_driver_come_from_the_cluster(self, folder, cluster):
        (folder / "sweeps").mkdir()
        (folder / "experiments").mkdir()
        text = EXPERIMENT.replace("paths: [texts]", f"paths: [{folder / 'texts'}]")
        write_tiny_sweep(folder, experiment=text)
        (folder / "e.yaml").rename(folder / "experiments" / "e.yaml")
        sweep = (folder / "s.yaml").read_text().replace("e.yaml", "../experiments/e.yaml")
        (folder / "sweeps" / "s.yaml").write_text(sweep)
        there, store = ("--address", cluster), Store(folder / "shared")
        code, out, error = run_kvlab_process(
            "submit", "sweeps/s.yaml", "--detach", *there, "--store", store.path
        )
        assert (code, error) == (0, "")
        job = out.split("detached: job ")[1].split()[0]
        code, out, _ = run_kvlab_process("logs", "s", "-f", *there)
        assert code == 0, out
        assert "s: 2 trials, 2 trainings\n" in out  # after what the preparation of the text says
        assert "2 done, 0 failed" in out
        assert store.sweep("s")["command"] == "kvlab submit sweeps/s.yaml"
        assert (store.path / "reports" / "s" / "report.md").exists()
        assert driver_log(store, "s", 1).read_text() == out
        facts = json.loads(run_kvlab_process("status", "s", "--json", *there)[1])
        assert facts["states"] == {"done": 2}
        assert (facts["job"]["job"], facts["job"]["exit_code"]) == (job, 0)
        trial = store.trial_ids()[0]
        assert run_kvlab_process("logs", trial[:6], *there)[1].rstrip().endswith("done")
        assert job in run_kvlab_process("status", *there)[1]

    def test_a_driver_is_stopped_through_the_cluster(self, folder, cluster):
        text = LONG.replace("paths: [texts]", f"paths: [{folder / 'texts'}]")
        write_tiny_sweep(folder, experiment=text)
        (folder / "s.yaml").rename(folder / "long.yaml")
        there, store = ("--address", cluster), Store(folder / "shared")
        run_kvlab_process("submit", "long.yaml", "--detach", *there, "--store", store.path)
        wait_for(lambda: any(map(store.is_running, store.trial_ids())))
        assert run_kvlab_process("stop", "long", *there)[0] == 0
        assert run_kvlab_process("logs", "long", "-f", *there)[0] == 130
        code, _, error = run_kvlab_process("stop", "long", *there)
        assert code == 2
        assert "its last driver ended with exit code 130" in error
        run_kvlab_process("submit", "long.yaml", "--detach", *there, "--store", store.path)
        wait_for(lambda: any(map(store.is_running, store.trial_ids())))
        assert run_kvlab_process("stop", "long", "--force", *there)[:2] == (
            0,
            "long was ended; submit it again to go on from the last checkpoints\n",
        )
        wait_for(lambda: not any(map(store.is_running, store.trial_ids())))
        assert "stopped" in run_kvlab_process("status", "long", *there)[1]


def test_the_driver_process_records_the_exit_code_of_its_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kvlab.cli.driver_process", str(tmp_path), "s", "--", "plan", "x"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    facts, state = read_driver(Store(tmp_path), "s", 1)
    assert (state, facts.exit_code) == ("ended", 2)
