"""`kvlab ui --live`: what the page is told, what it refuses, and how it looks in a browser."""

import json
import shutil
import threading
import time
from contextlib import ExitStack
from http.client import HTTPConnection

import pytest

from kvlab.cli.live_server import LiveServer, serve_live
from kvlab.cli.main import main
from kvlab.errors import UsageError
from kvlab.store import Store
from tests.support.browser import Browser
from tests.support.record_factory import Record
from tests.support.stub_search import SEARCH, searching

BAD = 'mqa"><img src=x onerror=alert(1)>'
CURVES = {"train_loss": [[1, 4096, 5.5], [2, 8192, 5.1]], "validation_loss": [[2, 8192, 5.0]]}


@pytest.fixture
def server(tmp_path):
    """A server of two sweeps: one runs its last trial, one is over."""
    root = tmp_path / "runs"

    def status(levels, seed):
        return "missing" if levels["heads"] == BAD and seed == 1 else "done"

    record = Record(name="now", factors={"heads": ("mha", BAD)}, seeds=(0, 1), status=status)
    Record(name="over", factors={"heads": ("mha", "mqa")}, seeds=(0,)).write(root)
    store = record.write(root)
    for name in ("now", "over"):
        store.write_sweep({**store.sweep(name), "report": {"sections": ["provenance"]}})
    trial = record.trial({"heads": BAD}, 1)
    with ExitStack() as stack:
        stack.enter_context(store.driver_lock("now").hold())
        stack.enter_context(store.trial_lock(trial).hold())
        progress = {"stage": "training", "step": 2, "steps": 4, "loss": 5.0, "seconds_left": 6.0}
        path = store.trial_directory(trial) / "progress.json"
        path.write_text(json.dumps({**progress, "tokens_per_second": 900.0, "curves": CURVES}))
        server = stack.enter_context(LiveServer(store, "127.0.0.1", 0, tmp_path / "reports"))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server, path, method="GET", host=None):
    """Return status, type and text of an answer."""
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    headers = {} if host is None else {"Host": host}
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers["Content-Type"], text


def test_the_page_is_told_what_runs_and_what_has_ended(server):
    sweeps = json.loads(get(server, "/api/sweeps")[2])
    assert [(one["sweep"], one["driven"]) for one in sweeps] == [("now", True), ("over", False)]
    facts = json.loads(get(server, "/api/sweep/now")[2])
    assert facts["states"] == {"done": 3, "running": 1}
    (running,) = facts["running"]
    assert (running["step"], running["steps"], running["left"]) == (2, 4, "6s")
    assert running["label"] == f"heads={BAD} seed=1"
    first, *others = facts["curves"]
    assert first["validation"] == [[8192, 5.0]]
    assert first["train"] == [[4096, 5.5], [8192, 5.1]]
    assert [curve["is_running"] for curve in others] == [False] * 3
    assert facts["left"]


def test_trials_of_a_search_are_named_by_their_settings(tmp_path):
    store, _, driver = searching(tmp_path, SEARCH.replace("trials: 12", "trials: 3"))
    driver.run()
    server = LiveServer(store, "127.0.0.1", 0, tmp_path / "reports")
    server.server_close()
    facts = server.describe_sweep("s")
    assert facts["search"]
    labels = [trial["label"] for trial in facts["ended"]]
    assert len(labels) >= 3
    assert not any("point=" in label for label in labels)


def test_a_damaged_sweep_hides_no_other(server):
    path = server.store.sweep_directory("over") / "sweep.json"
    path.write_text(path.read_text()[:40])
    sweeps = json.loads(get(server, "/api/sweeps")[2])
    assert [one["states"] for one in sweeps] == [{"done": 3, "running": 1}, {"damaged": 1}]
    status, _, text = get(server, "/api/sweep/over")
    assert status == 500
    assert "sweep.json is damaged" in text


def test_the_report_is_partial_and_follows_the_record(server):
    status, kind, page = get(server, "/report/now/report.html")
    assert (status, kind) == (200, "text/html")
    assert "over 3 trials" in page
    record = Record(name="now", factors={"heads": ("mha", BAD)}, seeds=(0, 1))
    record.write_result(server.store, {"heads": BAD}, 1, "done")
    assert "over 4 trials" in get(server, "/report/now/report.html")[2]
    assert get(server, "/report/now/results.csv")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/report/now/../../runs/sweeps/now/sweep.json",
        "/report/now/..%2f..%2fruns%2fsweeps%2fnow%2fsweep.json",
        "/report/..%2fruns/report.html",
        "/report/now//etc/passwd",
        "/report/none/report.html",
        "/api/sweep/none",
        "/api/sweep/..%2fnow",
        "/live_server.py",
        "/..%2flive_server.py",
        "/nothing",
    ],
)
def test_other_paths_are_not_served(server, path):
    status, kind, text = get(server, path)
    assert status == 404
    assert kind.startswith("text/plain")
    assert "question" not in text


def test_another_site_cannot_read_the_record(server):
    assert get(server, "/api/sweeps", host="evil.example")[0] == 403
    assert get(server, "/api/sweeps", host="localhost:1")[0] == 200
    assert get(server, "/api/sweeps", method="POST")[0] == 501


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_in_a_browser(server, tmp_path):
    browser = Browser(shutil.which("chromium"), tmp_path / "profile")
    try:
        browser.look(1400, "dark")
        browser.visit(f"{server.address}sweep/now")
        wait_for(browser, "document.querySelectorAll('#curves circle title').length > 3")
        assert browser.run("document.getElementById('running').innerText").count(BAD) == 1
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert browser.run("document.querySelector('#running progress').value") == 2
        assert browser.run("document.documentElement.scrollWidth") == 1400
        browser.run(
            "(s => { s.value = 'over'; s.dispatchEvent(new Event('change')) })"
            "(document.getElementById('sweep'))"
        )
        wait_for(
            browser, "document.getElementById('report').contentDocument?.title?.startsWith('over')"
        )
        assert browser.run("location.pathname") == "/sweep/over"
        assert browser.run("document.getElementById('running-part').hidden")
        assert browser.errors == []
    finally:
        browser.close()


def wait_for(browser, condition) -> None:
    end = time.monotonic() + 60
    while not browser.run(f"Boolean({condition})"):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


def test_it_says_where_it_is_and_who_can_read_it(tmp_path, monkeypatch):
    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(LiveServer, "serve_forever", interrupt)
    said = []
    serve_live(Store(tmp_path), "127.0.0.1", 0, said.append)
    assert said[0].startswith("http://127.0.0.1:")
    assert said[1:] == ["ended"]
    serve_live(Store(tmp_path), "0.0.0.0", 0, said.append)
    assert "reachable from other machines" in said[3]


def test_wrong_use(server, tmp_path, capsys):
    port = server.server_address[1]
    with pytest.raises(UsageError, match=f"--port = {port} cannot be used"):
        serve_live(Store(tmp_path), "127.0.0.1", port, print)
    assert main(["ui", "--host", "0.0.0.0", "--store", str(tmp_path)]) == 2
    assert "add --live" in capsys.readouterr().err
    assert main(["ui", "--live", "--tracking-uri", "http://x", "--store", str(tmp_path)]) == 2
    assert "leave it out" in capsys.readouterr().err
    assert main(["ui", "--live", "--port", "0", "--store", str(tmp_path)]) == 2
