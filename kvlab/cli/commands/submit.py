"""`kvlab submit`: run what a sweep is missing, write its report, and mirror both into MLflow."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from kvlab.cli import notification, sweep_callbacks
from kvlab.cli.detach import submit_detached
from kvlab.cli.progress_display import ProgressDisplay, outcome_line
from kvlab.cli.search_summary import promote_trials, search_lines
from kvlab.cli.shared_arguments import add_json, add_store, read_sweep
from kvlab.cli.sweep_callbacks import BackupCallback, MLflowCallback
from kvlab.cli.terminal import tolerate_broken_output
from kvlab.errors import UsageError
from kvlab.store import Store
from kvlab.store.progress import format_duration
from kvlab.store.provenance import Origin, capture_origin, redact_command
from kvlab.sweep import Driver, Plan, PlannedTrial, Summary, plan
from kvlab.sweep.driver.events import PrepareTrials
from kvlab.sweep.driver.preparation import SmokeTests, prefetch_data
from kvlab.sweep.driver.shutdown import stop_on_signal
from kvlab.sweep.executors import EXECUTORS
from kvlab.sweep.executors.executor import Executor, RunTask
from kvlab.sweep.ops.shared_store import check_store_is_shared
from kvlab.sweep.planning.budget import estimate_budget
from kvlab.sweep.planning.memory_check import MachineMemory, check_memory, measure_machine_memory
from kvlab.sweep.planning.planner import describe_sweep, trials_to_run, uses_pruning
from kvlab.sweep.search.searcher import Searcher
from kvlab.trial.smoke_test import run_task


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", metavar="SWEEP", help="a sweep's YAML file")
    add_store(parser)
    parser.add_argument(
        "--executor",
        choices=sorted(EXECUTORS, reverse=True),
        default="ray",
        help="ray (default) runs several trials at once, inline one after the other in here",
    )
    parser.add_argument("--address", help="of a running Ray cluster; default: a local one")
    parser.add_argument(
        "--detach",
        action="store_true",
        help="return at once: the driver goes on as a process of its own, or with --address as a"
        " job of that cluster",
    )
    parser.add_argument(
        "--smoke",
        action=argparse.BooleanOptionalAction,
        help="take one step of every architecture before the long work (default: where a"
        " training takes more than five minutes)",
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="run trials that failed before once more"
    )
    parser.add_argument(
        "--promote",
        action="append",
        default=[],
        metavar="TRIAL",
        help="train a trial that the search has pruned to its end; may be given again",
    )
    parser.add_argument("--no-report", action="store_true", help="write no report at the end")
    parser.add_argument(
        "--reports", default="reports", metavar="DIR", help="folder of reports (default: reports)"
    )
    parser.add_argument("--tracking-uri", metavar="URI", help="of an MLflow server")
    parser.add_argument(
        "--copy-to",
        default=os.environ.get(sweep_callbacks.COPY_TO_VARIABLE),
        metavar="URL",
        help=f"copy results and checkpoints there (default: {sweep_callbacks.COPY_TO_VARIABLE}, else nowhere)",
    )
    parser.add_argument(
        "--notify",
        default=os.environ.get(notification.NOTIFY_VARIABLE),
        metavar="COMMAND",
        help="shell command for the end, with the summary as JSON on its standard input"
        f" (default: {notification.NOTIFY_VARIABLE}, else none)",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    if options.address is not None and options.executor != "ray":
        raise UsageError(f"--address = {options.address} needs --executor ray; leave out one")
    if options.detach:
        return submit_detached(options)
    with tolerate_broken_output():
        return _submit(options)


def _submit(options: argparse.Namespace) -> int:
    sweep = read_sweep(options.sweep)
    if options.promote and not uses_pruning(sweep):
        text = f"--promote = {options.promote[0]} needs a search with pruning"
        raise UsageError(f"{text}, and {sweep.name} prunes nothing; leave it out")
    store = Store(Path(options.store).absolute())
    planned = plan(sweep, store)
    stream = sys.stderr if options.json else sys.stdout
    live = ProgressDisplay(planned, store, stream, retry_failed=options.retry_failed)
    mirror = MLflowCallback(store, sweep.name, options.tracking_uri, live.say)
    copies = BackupCallback(store, sweep.name, options.copy_to, live.say)

    def on_result(trial: str) -> None:
        mirror.result(trial)
        copies.result(trial)

    with notification.notify_at_end(options.notify, sweep.name, store.path, live.say) as told:
        summary = _run_driver(options, planned, store, live, on_result)
        facts: dict[str, Any] = {"sweep": sweep.name, "states": dict(summary.states)}
        _print_summary(planned, store, summary, stream)
        report = None
        if summary.exit_code != 130 and not options.no_report:
            report = _write_report(options, sweep.name, store)
            facts["report"] = str(report)
        facts["mlflow"], facts["copy"] = mirror.finish(report), copies.finish()
        told |= {**facts, **notification.outcome_facts(summary)}
    if report is not None:
        print(report, file=stream)
    if options.json:
        print(json.dumps(facts, indent=1))
    return summary.exit_code


def _run_driver(
    options: argparse.Namespace,
    planned: Plan,
    store: Store,
    live: ProgressDisplay,
    on_result: Callable[[str], None],
) -> Summary:
    sweep, missing = planned.sweep, trials_to_run(planned, options.retry_failed)
    command, source = _neutral_command(options), sweep.source
    describe = partial(
        describe_sweep,
        yaml=source.document.text,
        experiment_yaml=source.base_document.text,
        command=command,
    )
    search = None if sweep.search is None else Searcher(planned, store, describe)
    if search is not None:
        promote_trials(search, store, options.promote)
        planned = search.plan
    flags = store.stop_flag(sweep.name), store.own_stop_flag(sweep.name)
    origin = capture_origin(command, *flags)
    live.say(f"{sweep.name}: {planned.totals()}")
    executor = _make_executor(options, store, origin, bool(missing) or search is not None)
    forced = True
    try:
        if options.address and (missing or search is not None):
            folder = store.sweep_directory(sweep.name)
            check_store_is_shared(store.path, folder, executor.on_every_machine)
        where = f" on {executor.describe()}" if missing or search is not None else ""
        live.say(f"{_describe_missing(planned, len(missing))}{where}; record in {options.store}")
        driver = Driver(
            planned,
            store,
            executor,
            origin=origin,
            description=describe(planned),
            before=make_preflight(options, planned, store, executor, origin, live),
            on_event=live.event,
            on_result=on_result,
            retry_failed=options.retry_failed,
            feed=search,
        )
        with stop_on_signal(driver.stop), live.watch(driver):
            summary = driver.run()
        if search is not None:
            live.say("\n".join(search_lines(search)))
        forced = False
        return summary
    finally:
        executor.close(force=forced)


def _neutral_command(options: argparse.Namespace) -> str:
    """What computes the same again: no places, no machine."""
    inline = ["--executor", "inline"] if options.executor == "inline" else []
    return redact_command(["submit", options.sweep, *inline])


def _make_executor(
    options: argparse.Namespace, store: Store, origin: Origin, needed: bool
) -> Executor:
    name = options.executor if needed else "inline"  # nothing to run starts no cluster
    own_process = name != "inline"
    work: RunTask = partial(
        run_task, store=store.path, origin=origin, capture_output=own_process, wait=False
    )
    return EXECUTORS[name](work, options.address if needed else None)


def _describe_missing(planned: Plan, missing: int) -> str:
    ended = len(planned.trials) - missing
    if planned.sweep.search is not None:
        return f"{ended} ended before, {missing} to run and what the search suggests"
    return f"{ended} ended before, {missing} to run" if missing else "nothing is missing"


def _print_summary(planned: Plan, store: Store, summary: Summary, stream: TextIO) -> None:
    states = summary.states
    parts = [f"{states['done']} done", f"{states['failed']} failed"]
    parts += [
        f"{states[state]} {state}" for state in ("diverged", "pruned", "missing") if states[state]
    ]
    print(f"{', '.join(parts)} in {format_duration(summary.seconds)}", file=stream)
    if states["failed"]:
        for one in planned.trials:
            if store.status(one.trial.id) == "failed":
                print(f"  {one.trial.id}  {outcome_line(store, one.trial.id)}", file=stream)
        print("failed trials are not run again unless asked: --retry-failed", file=stream)
    if summary.exit_code == 130:
        print("stopped; submit again to go on from the last checkpoints", file=stream)


def _write_report(options: argparse.Namespace, sweep: str, store: Store) -> Path:
    from kvlab.report import write_report

    with store.report_lock(sweep).hold():  # several drivers may end at once
        return write_report(store, sweep, Path(options.reports))


# What `kvlab submit` does before the first trial: texts made ready, architectures tested.


def make_preflight(
    options: argparse.Namespace,
    planned: Plan,
    store: Store,
    executor: Executor,
    origin: Origin,
    live: ProgressDisplay,
) -> PrepareTrials:
    """The driver's preparation, as the options say.

    Raises:
        ResourceError: a training cannot fit the memory of any machine.
        UsageError: a search shares GPUs by memory, which is measured before its trials are known.
    """
    packed = any(one.trial.experiment.resources.gpus == "auto" for one in planned.trials)
    if packed and planned.sweep.search is not None:
        text = "resources.gpus = auto is measured before trials start, and a search finds its"
        raise UsageError(f"{text} trials as it goes; write a number, such as 0.5")
    smoke = SmokeTests(store, planned.sweep.name, executor, origin, live.say, options.smoke)

    def prepare(missing: list[PlannedTrial], check_stop: Callable[[], None]) -> list[PlannedTrial]:
        for line in check_memory(
            missing, _machine_memories(options, executor), _runs_one_at_a_time(options, planned)
        ):
            live.say(line)
        if not options.address:  # a cluster's machines have data folders of their own
            prefetch_data(missing, live.note, check_stop)
        live.prepared()
        costs = estimate_budget(planned, store)
        smoke.rate = costs.rate.flops_per_second if costs and costs.rate else None
        return smoke(missing, check_stop)

    return prepare


def _machine_memories(options: argparse.Namespace, executor: Executor) -> list[MachineMemory]:
    """The memory of the machines that trials may run on; of those that answer."""
    answers = [measure_machine_memory()]
    if options.address:
        found = executor.on_every_machine(measure_machine_memory, "").values()
        answers = [answer for answer in found if isinstance(answer, str)]
    return [MachineMemory(**json.loads(answer)) for answer in answers]


def _runs_one_at_a_time(options: argparse.Namespace, planned: Plan) -> bool:
    """Whether one trial runs at a time; the base of a search always does."""
    return options.executor == "inline" or planned.sweep.search is not None
