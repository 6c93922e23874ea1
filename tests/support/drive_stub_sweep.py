"""Drive the stub sweep in a process of its own: ``python -m tests.support.drive_stub_sweep``."""

import argparse
import json
import sys
from pathlib import Path

from kvlab.cli.sweep_publishers import MLflowPublisher
from kvlab.errors import KvlabError
from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.sweep import Driver, Stage, Summary, plan_stage
from kvlab.sweep.driver.driver import run_stages
from kvlab.sweep.driver.driver_registry import stop_on_signal
from kvlab.sweep.executors import make_executor
from kvlab.sweep.planning.planner import describe_stage
from tests.support.stub_looks import KnownRun, SurfaceRun
from tests.support.stub_trials import StubRun, identify


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--executor", default="inline")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--script", default="[]", help="[[index of trial, stage, step, act], ...]")
    parser.add_argument("--mlflow", action="store_true")
    losses = parser.add_mutually_exclusive_group()
    losses.add_argument("--known-loss", action="store_true", help="that of stub_looks")
    losses.add_argument("--surfaces", action="store_true", help="those of its tuning")
    options = parser.parse_args()
    store = Store(options.folder / "runs")
    sweep = load_sweep(options.folder / "s.yaml")
    stage = plan_stage(sweep, store, identify=identify)
    script = {
        (stage.plan.trials[index].trial.id, kind, step): act
        for index, kind, step, act in json.loads(options.script)
    }
    own_flag = store.new_driver_stop_flag("s")
    run_class = KnownRun if options.known_loss else SurfaceRun if options.surfaces else StubRun
    run = run_class(store.path, own_flag=str(own_flag), seconds=options.seconds, script=script)
    executor = make_executor(options.executor, run)
    retried = []
    mirror = MLflowPublisher(
        argparse.Namespace(tracking_uri=None), store, "s", lambda line: print(line, file=sys.stderr)
    )

    def run_stage(one: Stage) -> Summary:
        driver = Driver(
            one.plan, store, executor, stop_flag=own_flag,
            description=describe_stage(one, yaml="", experiment_yaml="", command=""),
            on_event=lambda e: retried.append(1) if e.kind == "retried" else None,
            on_result=mirror.on_result if options.mlflow else lambda _: None,
        )  # fmt: skip
        with stop_on_signal(driver.stop):
            return driver.run()

    try:
        summary = run_stages(stage, run_stage, lambda: plan_stage(sweep, store, identify=identify))
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
