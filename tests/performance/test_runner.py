"""What `python -m tests.performance` answers with when a benchmark misses its limit."""

from types import SimpleNamespace

from tests.performance import __main__ as runner
from tests.performance.timing import LimitMissed


def missing():
    yield "three times"
    raise LimitMissed("three times is above twice")


def test_a_missed_limit_fails_the_run_and_the_others_run(monkeypatch, capsys):
    modules = {"slow": SimpleNamespace(run=missing), "fine": SimpleNamespace(run=lambda: ["ok"])}
    monkeypatch.setattr(runner, "BENCHMARKS", dict(zip(modules, modules, strict=True)))
    monkeypatch.setattr(runner, "import_module", lambda name: modules[name.split(".")[-1]])
    monkeypatch.setattr(runner.sys, "argv", ["benchmarks"])
    assert runner.main() == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "== slow", "three times", "MISSED: three times is above twice", "== fine", "ok",
    ]  # fmt: skip
    monkeypatch.setattr(runner.sys, "argv", ["benchmarks", "fine"])
    assert runner.main() == 0
    monkeypatch.setattr(runner.sys, "argv", ["benchmarks", "none"])
    assert runner.main() == 2
