"""`kvlab live`: what the page is told, what it refuses, and how it looks in a browser."""

import json
import os
import shutil
import signal
import socket
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from kvlab.cli.main import main
from kvlab.errors import UsageError
from kvlab.extensions.live_page import server as live_server
from kvlab.extensions.live_page.server import LivePage, listen
from kvlab.store import Store
from kvlab.store.timings import write_timings
from tests.extensions.live_page.served import ask, serve
from tests.support.browser import Browser
from tests.support.record_factory import Record

BAD = 'mqa"><img src=x onerror=alert(1)>'
CURVES = {"train_loss": [[1, 4096, 5.5], [2, 8192, 5.1]], "validation_loss": [[2, 8192, 5.0]]}


@pytest.mark.parametrize("host", ["nowhere.invalid", "203.0.113.5"])
def test_a_host_that_is_not_here_is_told_from_a_port_in_use(host):
    with pytest.raises(UsageError, match="name an address of this machine"):
        listen(host, 0)
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"in use.; name another port, such as {port + 1}"):
            listen("127.0.0.1", port)


@pytest.fixture
def page(tmp_path):
    """The page of two sweeps: one runs its last trial, one is over."""
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
        yield LivePage(store, tmp_path / "reports")


@pytest.fixture
def get(page):
    """Ask a server of the page; return status, type and text of its answer."""
    with serve(page) as port:
        yield partial(ask, port)


def test_the_page_is_told_what_runs_and_what_has_ended(get):
    sweeps = json.loads(get("/api/sweeps")[2])
    assert [(one["sweep"], one["driven"]) for one in sweeps] == [("now", True), ("over", False)]
    facts = json.loads(get("/api/sweep/now")[2])
    assert facts["states"] == {"done": 3, "running": 1}
    (running,) = facts["running"]
    assert (running["step"], running["steps"], running["left"]) == (2, 4, "6s")
    assert running["label"] == f"heads={BAD} seed=1"
    first, *others = facts["curves"]
    assert first["validation"] == [[8192, 5.0]]
    assert first["train"] == [[4096, 5.5], [8192, 5.1]]
    assert [curve["is_running"] for curve in others] == [False] * 3
    assert facts["left"]


def test_a_damaged_sweep_hides_no_other(page, get, tmp_path):
    path = page.store.sweep_directory("over") / "sweep.json"
    path.write_text(path.read_text()[:40])
    sweeps = json.loads(get("/api/sweeps")[2])
    assert [one["states"] for one in sweeps] == [{"done": 3, "running": 1}, {"damaged": 1}]
    status, _, text = get("/api/sweep/over")
    assert status == 500
    assert "sweep.json is damaged" in text
    assert str(tmp_path) not in text
    assert "/" not in text, "no folder of the machine"


def test_the_report_is_partial_and_follows_the_record(page, get):
    status, kind, text = get("/report/now/report.html")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert "over 3 trials" in text
    record = Record(name="now", factors={"heads": ("mha", BAD)}, seeds=(0, 1))
    record.write_result(page.store, {"heads": BAD}, 1, "done")
    assert "over 4 trials" in get("/report/now/report.html")[2]
    assert get("/report/now/results.csv")[0] == 200


def test_what_is_measured_again_is_shown(page, monkeypatch):
    """A trial that runs again ends as it did, and one that is timed again has the same result."""
    monkeypatch.setattr(live_server, "REFRESH_SECONDS", 0.0)
    levels, told = {"heads": "mha"}, []
    monkeypatch.setattr("kvlab.report.write_report", lambda *_: told.append("written"))
    record = Record(name="over", factors={"heads": ("mha", "mqa")}, seeds=(0,))
    assert "7.2500" not in str(page.describe_sweep("over")["ended"])
    page.find_report("over")
    page.find_report("over")
    assert told == ["written"]
    record.change = lambda result, *_: result["measurements"].update(loss=7.25)
    record.write_result(page.store, levels, 0, "done")
    monkeypatch.setattr(page, "_facts", {})
    newest, _ = page.describe_sweep("over")["ended"]
    assert newest["trial"] == record.trial(levels, 0)
    assert newest["detail"].startswith("loss 7.2500")
    page.find_report("over")
    write_timings(page.store.sweep_directory("over"), [])
    page.find_report("over")
    assert told == ["written"] * 3


@pytest.mark.parametrize(
    "path",
    [
        "/report/none/report.html", "/api/sweep/none", "http://[/", "*", f"/report/now/{'x' * 300}",
        "/report/now/%2e%2e/%2e%2e/runs/sweeps/now/sweep.json", "/report/now/../../x",
        "/report/..%2fx/y", "/report/now//etc/passwd", "/%2e%2e/x", "/report/now/%00",
        "/api/sweep/..%2f..%2fx",
    ],
)  # fmt: skip
def test_other_paths_and_methods_are_not_served(get, path, tmp_path):
    (tmp_path / "x").write_text("secret")
    (tmp_path / "reports" / "now").mkdir(parents=True)
    status, kind, text = get(path)
    assert (status, kind.partition(";")[0]) == (404, "text/plain")
    assert "question" not in text
    assert "secret" not in text
    assert get("/api/sweeps", method="POST")[0] == 405


def test_nobody_can_keep_the_page_from_others(page, monkeypatch, capfd):
    monkeypatch.setattr(live_server, "REQUEST_SECONDS", 0.5)
    with serve(page) as port, ExitStack() as stack:
        silent = []
        for number in range(64):  # a process of macOS has 256 files, and both ends are of this one
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            one.sendall([b"", b"GET", b"GET / HTTP/1.1\r\nHost: x"][number % 3])
            silent.append(one)
        assert ask(port, "/api/sweeps")[0] == 200
        assert [one.recv(1) for one in silent] == [b""] * 64, "each is closed in its turn"
        assert ask(port, "/api/sweeps")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_an_error_shows_no_folder_and_no_traceback(page, get, monkeypatch, capfd):
    monkeypatch.setattr(page, "list_sweeps", lambda: Path("/no/such/folder").stat())
    assert get("/api/sweeps") == (500, "text/plain; charset=utf-8", "No such file or directory\n")
    assert get("http://[/")[0] == 404
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_in_a_browser(page, tmp_path):
    with ExitStack() as stack:
        port = stack.enter_context(serve(page))
        browser = Browser(shutil.which("chromium"), tmp_path / "profile")
        stack.callback(browser.close)
        browser.look(1400, "dark")
        browser.visit(f"http://127.0.0.1:{port}/sweep/now")
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
        browser.run(
            "fetch = (real => (...a) => real(...a).finally(() => polls++))(fetch); polls = 0"
        )
        wait_for(browser, "polls > 3")
        state = browser.run("document.getElementById('report-state').textContent")
        assert state == "of all trials", "not those that have ended since another sweep's report"
        assert browser.errors == []


def wait_for(browser, condition) -> None:
    end = time.monotonic() + 60
    while not browser.run(f"Boolean({condition})"):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


def test_it_says_where_it_is_and_who_can_read_it_until_ctrl_c(tmp_path, capsys):
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    answers = []

    def visit_and_interrupt():
        while not answers:
            time.sleep(0.05)
            with suppress(ConnectionError):
                answers.append(ask(port, "/api/sweeps")[2])
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=visit_and_interrupt)
    thread.start()
    words = ["live", "--host", "0.0.0.0", "--port", str(port), "--store", str(tmp_path)]
    assert main(words) == 0
    thread.join()
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"http://127.0.0.1:{port}/ follows")
    assert "reachable from other machines" in second
    assert (answers, last) == (["[]"], "ended")


@pytest.mark.parametrize(
    ("listens", "host", "status"),
    [
        ("127.0.0.1", "10.0.0.1", 403),
        ("0.0.0.0", "evil.example", 403),
        ("0.0.0.0", "10.0.0.1:5001", 200),
        ("0.0.0.0", socket.gethostname(), 200),
    ],
)
def test_the_live_page_answers_to_its_own_names(tmp_path, listens, host, status):
    with serve(LivePage(Store(tmp_path), tmp_path / "reports"), listens) as port:
        assert ask(port, "/api/sweeps", host=host)[0] == status
