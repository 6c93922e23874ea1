"""Drives the stub sweep in a process of its own: ``python -m tests.sweep.drive_stub OPTIONS``."""

import argparse
import json
from pathlib import Path

from kvlab.errors import KvlabError
from kvlab.spec import load_sweep
from kvlab.sweep import Driver, plan
from kvlab.sweep.executors import EXECUTORS
from kvlab.sweep.interrupt import graceful_stop
from kvlab.trial import Store
from tests.sweep.stub import StubRun, identify


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--executor", default="inline")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--script", default="[]", help="[[index of trial, stage, step, act], ...]")
    options = parser.parse_args()
    store = Store(options.folder / "runs")
    planned = plan(load_sweep(options.folder / "s.yaml"), store, identify=identify)
    script = {
        (planned.trials[index].trial.id, stage, step): act
        for index, stage, step, act in json.loads(options.script)
    }
    run = StubRun(store.path, seconds=options.seconds, script=script)
    executor = EXECUTORS[options.executor](run, None)
    retried = []
    driver = Driver(
        planned, store, executor, on_event=lambda e: retried.append(1) if e.message else None
    )
    try:
        with graceful_stop(driver.stop):
            summary = driver.run()
    except KvlabError as error:
        print(json.dumps({"error": str(error)}))
    else:
        facts = {"states": dict(summary.states), "ran": summary.ran, "retried": len(retried)}
        print(json.dumps({**facts, "exit": summary.exit_code}))
    finally:
        executor.close()


if __name__ == "__main__":
    main()
