"""Drive the stub sweep in a process of its own: ``python -m tests.support.drive_stub_sweep``."""

import argparse
import json
import sys
from pathlib import Path

from kvlab.cli.sweep_callbacks import MLflowCallback
from kvlab.errors import KvlabError
from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.sweep import Driver, plan
from kvlab.sweep.driver.shutdown import stop_on_signal
from kvlab.sweep.executors import make_executor
from kvlab.sweep.planning.planner import describe_sweep
from tests.support.stub_trials import StubRun, identify


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--executor", default="inline")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--script", default="[]", help="[[index of trial, stage, step, act], ...]")
    parser.add_argument("--mlflow", action="store_true")
    options = parser.parse_args()
    store = Store(options.folder / "runs")
    planned = plan(load_sweep(options.folder / "s.yaml"), store, identify=identify)
    script = {
        (planned.trials[index].trial.id, stage, step): act
        for index, stage, step, act in json.loads(options.script)
    }
    own_flag = store.new_driver_stop_flag("s")
    run = StubRun(store.path, own_flag=str(own_flag), seconds=options.seconds, script=script)
    executor = make_executor(options.executor, run)
    retried = []
    mirror = MLflowCallback(store, "s", None, lambda line: print(line, file=sys.stderr))
    driver = Driver(
        planned,
        store,
        executor,
        stop_flag=own_flag,
        description=describe_sweep(planned, yaml="", experiment_yaml="", command=""),
        on_event=lambda e: retried.append(1) if e.message else None,
        on_result=mirror.on_result if options.mlflow else None,
    )
    try:
        with stop_on_signal(driver.stop):
            summary = driver.run()
        if options.mlflow:
            mirror.finish(None)
    except KvlabError as error:
        print(json.dumps({"error": str(error)}))
    else:
        facts = {"states": dict(summary.states), "ran": summary.trials_run, "retried": len(retried)}
        print(json.dumps({**facts, "exit": summary.exit_code}))
    finally:
        executor.close()


if __name__ == "__main__":
    main()
