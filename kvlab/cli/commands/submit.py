"""`kvlab submit`: run what a sweep is missing, write its report, and mirror both into MLflow."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from kvlab.cli import copier, notify
from kvlab.cli.before import before
from kvlab.cli.copier import Copier
from kvlab.cli.detach import detach
from kvlab.cli.live import Live, outcome_line
from kvlab.cli.mirror import Mirror
from kvlab.cli.options import add_json, add_store
from kvlab.cli.outlast import outlasting_output
from kvlab.cli.search import promote, search_lines
from kvlab.cli.sweep_file import read_sweep
from kvlab.errors import UsageError
from kvlab.sweep import Driver, Plan, Summary, plan
from kvlab.sweep.description import sweep_description
from kvlab.sweep.executor import Executor, Run
from kvlab.sweep.executors import EXECUTORS
from kvlab.sweep.interrupt import graceful_stop
from kvlab.sweep.plan import prunes, to_run
from kvlab.sweep.search import Search
from kvlab.sweep.shared_store import check_shared
from kvlab.trial import Store
from kvlab.trial.origin import Origin, capture_origin, neutral_command
from kvlab.trial.progress import duration
from kvlab.trial.smoke import run_work


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
        default=os.environ.get(copier.VARIABLE),
        metavar="URL",
        help=f"copy results and checkpoints there (default: {copier.VARIABLE}, else nowhere)",
    )
    parser.add_argument(
        "--notify",
        default=os.environ.get(notify.VARIABLE),
        metavar="COMMAND",
        help="shell command for the end, with the summary as JSON on its standard input"
        f" (default: {notify.VARIABLE}, else none)",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    if options.address is not None and options.executor != "ray":
        raise UsageError(f"--address = {options.address} needs --executor ray; leave out one")
    if options.detach:
        return detach(options)
    with outlasting_output():
        return _submit(options)


def _submit(options: argparse.Namespace) -> int:
    sweep = read_sweep(options.sweep)
    if options.promote and not prunes(sweep):
        text = f"--promote = {options.promote[0]} needs a search with pruning"
        raise UsageError(f"{text}, and {sweep.name} prunes nothing; leave it out")
    store = Store(Path(options.store).absolute())
    planned = plan(sweep, store)
    stream = sys.stderr if options.json else sys.stdout
    live = Live(planned, store, stream, retry_failed=options.retry_failed)
    mirror = Mirror(store, sweep.name, options.tracking_uri, live.say)
    copies = Copier(store, sweep.name, options.copy_to, live.say)

    def on_result(trial: str) -> None:
        mirror.result(trial)
        copies.result(trial)

    with notify.announced(options.notify, sweep.name, store.path, live.say) as told:
        summary = _drive(options, planned, store, live, on_result)
        facts: dict[str, Any] = {"sweep": sweep.name, "states": dict(summary.states)}
        _print_summary(planned, store, summary, stream)
        report = None
        if summary.exit_code != 130 and not options.no_report:
            report = _report(options, sweep.name, store)
            facts["report"] = str(report)
        facts["mlflow"], facts["copy"] = mirror.finish(report), copies.finish()
        told |= {**facts, **notify.ending(summary)}
    if report is not None:
        print(report, file=stream)
    if options.json:
        print(json.dumps(facts, indent=1))
    return summary.exit_code


def _drive(
    options: argparse.Namespace,
    planned: Plan,
    store: Store,
    live: Live,
    on_result: Callable[[str], None],
) -> Summary:
    sweep, missing = planned.sweep, to_run(planned, options.retry_failed)
    command, source = _command(options), sweep.source
    describe = partial(
        sweep_description,
        yaml=source.document.text,
        experiment_yaml=source.base_document.text,
        command=command,
    )
    search = None if sweep.search is None else Search(planned, store, describe)
    if search is not None:
        promote(search, store, options.promote)
        planned = search.plan
    flags = store.stop_flag(sweep.name), store.own_stop_flag(sweep.name)
    origin = capture_origin(command, *flags)
    live.say(f"{sweep.name}: {planned.totals()}")
    executor = _executor(options, store, origin, bool(missing) or search is not None)
    forced = True
    try:
        if options.address and (missing or search is not None):
            folder = store.sweep_directory(sweep.name)
            check_shared(store.path, folder, executor.on_every_machine)
        where = f" on {executor.describe()}" if missing or search is not None else ""
        live.say(f"{_counts(planned, len(missing))}{where}; record in {options.store}")
        driver = Driver(
            planned,
            store,
            executor,
            origin=origin,
            description=describe(planned),
            before=before(options, planned, store, executor, origin, live),
            on_event=live.event,
            on_result=on_result,
            retry_failed=options.retry_failed,
            feed=search,
        )
        with graceful_stop(driver.stop), live.watch(driver):
            summary = driver.run()
        if search is not None:
            live.say("\n".join(search_lines(search)))
        forced = False
        return summary
    finally:
        executor.close(force=forced)


def _command(options: argparse.Namespace) -> str:
    """What computes the same again: no places, no machine."""
    inline = ["--executor", "inline"] if options.executor == "inline" else []
    return neutral_command(["submit", options.sweep, *inline])


def _executor(options: argparse.Namespace, store: Store, origin: Origin, needed: bool) -> Executor:
    name = options.executor if needed else "inline"  # nothing to run starts no cluster
    own_process = name != "inline"
    work: Run = partial(
        run_work, store=store.path, origin=origin, capture_output=own_process, wait=False
    )
    return EXECUTORS[name](work, options.address if needed else None)


def _counts(planned: Plan, missing: int) -> str:
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
    print(f"{', '.join(parts)} in {duration(summary.seconds)}", file=stream)
    if states["failed"]:
        for one in planned.trials:
            if store.status(one.trial.id) == "failed":
                print(f"  {one.trial.id}  {outcome_line(store, one.trial.id)}", file=stream)
        print("failed trials are not run again unless asked: --retry-failed", file=stream)
    if summary.exit_code == 130:
        print("stopped; submit again to go on from the last checkpoints", file=stream)


def _report(options: argparse.Namespace, sweep: str, store: Store) -> Path:
    from kvlab.report import write_report

    with store.report_lock(sweep).hold():  # several drivers may end at once
        return write_report(store, sweep, Path(options.reports))
