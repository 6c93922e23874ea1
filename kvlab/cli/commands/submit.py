"""`kvlab submit`: run the missing trials of a sweep, write its report, publish both."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kvlab.analysis.search_results import SearchResults
from kvlab.analysis.study import Study
from kvlab.cli.progress_display import ProgressDisplay, format_outcome
from kvlab.cli.search_summary import format_search, promote_trials, suggest_confirmation
from kvlab.cli.shared_arguments import (
    add_json,
    add_reports,
    add_scale,
    add_store,
    find_project_root,
    find_sweep_file,
    read_sweep,
)
from kvlab.cli.sweep_callbacks import (
    COPY_TO_VARIABLE,
    NOTIFY_VARIABLE,
    BackupCallback,
    MLflowCallback,
    collect_outcome,
    notify_at_end,
)
from kvlab.cli.terminal import print_answer, tolerate_broken_output
from kvlab.errors import Stopped, StoreError, UsageError
from kvlab.humanize import format_duration
from kvlab.spec import DataConfig, Sweep
from kvlab.store import Store
from kvlab.store.provenance import Origin, capture_origin, redact_command
from kvlab.store.verification import heal_description
from kvlab.sweep import Driver, Plan, PlannedTrial, Stage, Summary, plan_stage
from kvlab.sweep.driver.driver import run_stages
from kvlab.sweep.driver.driver_registry import interrupt_on_stop, join_sweep, stop_on_signal
from kvlab.sweep.driver.preparation import SmokeTests, prefetch_evaluation_sets
from kvlab.sweep.driver.retiming import plan_retiming, time_again
from kvlab.sweep.driver.retry_policy import reopen_tuning
from kvlab.sweep.driver.shared_store import check_store_is_shared
from kvlab.sweep.driver.sweep_progress import PrepareTrials
from kvlab.sweep.executors import DEFAULT_EXECUTOR, EXECUTORS, IDLE_EXECUTOR, make_executor
from kvlab.sweep.executors.executor import Executor, RunTask
from kvlab.sweep.planning.budget import estimate_budget
from kvlab.sweep.planning.memory_check import MachineMemory, check_memory, measure_machine_memory
from kvlab.sweep.planning.planner import ended_status, trials_to_run, uses_pruning
from kvlab.sweep.planning.stages import describe_stage
from kvlab.sweep.planning.texts import find_text, prepare_text
from kvlab.sweep.search.search_history import count_remaining_suggestions
from kvlab.sweep.search.searcher import Searcher
from kvlab.trial.task import run_task

if TYPE_CHECKING:
    from kvlab.data import DatasetFacts

PREPARATION_SECONDS = 10.0
"""Time between two lines about the preparation of text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", metavar="SWEEP", help="name or file of a sweep")
    add_scale(parser)
    add_store(parser)
    parser.add_argument(
        "--executor",
        choices=list(EXECUTORS),
        default=DEFAULT_EXECUTOR,
        help="; ".join(f"{name}: {entry.summary}" for name, entry in EXECUTORS.items())
        + f" (default: {DEFAULT_EXECUTOR})",
    )
    parser.add_argument("--address", help="of a running Ray cluster (default: start a local one)")
    parser.add_argument(
        "--smoke",
        action=argparse.BooleanOptionalAction,
        help="run one step of every architecture before the first training (default: if a"
        " training takes more than five minutes)",
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="also run trials that failed before"
    )
    parser.add_argument(
        "--retime",
        action="store_true",
        help="time trials again at the end that were disturbed when an earlier submit did so",
    )
    parser.add_argument(
        "--promote",
        action="append",
        default=[],
        metavar="TRIAL",
        help="train a trial to its end that the search has pruned; may be repeated",
    )
    _add_publishing(parser)
    add_json(parser)


def _add_publishing(parser: argparse.ArgumentParser) -> None:
    """Add the options about what happens with the results: report, MLflow, copies, notification."""
    parser.add_argument("--no-report", action="store_true", help="write no report at the end")
    add_reports(parser)
    parser.add_argument("--tracking-uri", metavar="URI", help="of an MLflow server")
    parser.add_argument(
        "--copy-to",
        default=os.environ.get(COPY_TO_VARIABLE),
        metavar="PLACE",
        help="copy the record, as `kvlab copy` does, every ten minutes to this URL or folder"
        f" (default: {COPY_TO_VARIABLE}, else nowhere)",
    )
    parser.add_argument(
        "--notify",
        default=os.environ.get(NOTIFY_VARIABLE),
        metavar="COMMAND",
        help="shell command to run at the end, with the summary as JSON on its standard input"
        f" (default: {NOTIFY_VARIABLE}, else none)",
    )


def run(options: argparse.Namespace) -> int:
    if options.address is not None and not EXECUTORS[options.executor].takes_address:
        names = " or ".join(name for name, entry in EXECUTORS.items() if entry.takes_address)
        raise UsageError(f"--address = {options.address} needs --executor {names}; leave out one")
    with tolerate_broken_output():
        return _submit(options)


def _submit(options: argparse.Namespace) -> int:
    sweep = read_sweep(options.sweep, options.scale)
    if options.promote and not uses_pruning(sweep):
        text = f"--promote = {options.promote[0]} needs a search with pruning"
        raise UsageError(f"{text}, and {sweep.name} prunes nothing; leave it out")
    store = Store(Path(options.store).absolute())
    stream = sys.stderr if options.json else sys.stdout
    for line in heal_description(store, sweep.name):
        print(f"healed  {line}", file=stream, flush=True)
    if options.retry_failed:
        reopen_tuning(store, sweep.name)
    try:
        stage = plan_stage(sweep, store, identify=_PrepareText(store, sweep.name, stream))
    except Stopped:
        print("stopped while the text is prepared; submit again to go on from there", file=stream)
        if options.json:
            print(json.dumps({"sweep": sweep.name, "states": {}}, indent=1))
        return 130
    display = ProgressDisplay(stage.plan, store, stream, retry_failed=options.retry_failed)
    warn = display.print_line
    for note in stage.plan.notes:
        warn(f"note: {note}")
    mlflow = MLflowCallback(store, sweep.name, options.tracking_uri, warn)
    backup = BackupCallback(store, sweep.name, options.copy_to, warn)

    def on_result(trial_id: str) -> None:
        mlflow.on_result(trial_id)
        backup.on_result(trial_id)

    with notify_at_end(options.notify, sweep.name, store.path, warn) as notice:
        summary = _run_sweep(options, stage, store, display, on_result)
        facts: dict[str, Any] = {"sweep": sweep.name, "states": dict(summary.states)}
        _print_summary(sweep.name, store, summary, stream)
        report = answer = None
        if summary.exit_code != 130 and not options.no_report:
            report, answer = _write_report_if_possible(options, sweep.name, store, warn)
            facts["report"] = None if report is None else str(report)
            facts["answer"] = answer
        facts["mlflow"], facts["copy"] = mlflow.finish(report), backup.finish()
        notice |= {**facts, **collect_outcome(summary)}
    if report is not None and answer is not None:
        print_answer(answer, report, stream)
    if options.json:
        print(json.dumps(facts, indent=1))
    return summary.exit_code


class _PrepareText:
    """Prepare the texts of a sweep, as a driver of it that `kvlab stop` can stop meanwhile."""

    def __init__(self, store: Store, sweep: str, stream: TextIO):
        self._store, self._sweep, self._print = store, sweep, _PrintSlowly(stream)

    def __call__(self, data: DataConfig) -> "DatasetFacts":
        """Return the facts of a text.

        Raises:
            Stopped: The sweep was asked to stop. What is tokenized stays.
            DataError: The text is unavailable.
        """
        if find_text(data) is not None:
            return prepare_text(data, self._print)
        with (
            join_sweep(self._store, self._sweep, None, exclusive=False),
            interrupt_on_stop(self._store.stop_flag(self._sweep)),
        ):
            return prepare_text(data, self._print)


class _PrintSlowly:
    """Print the lines of a preparation: the first, and then one every ten seconds."""

    def __init__(self, stream: TextIO):
        self._stream, self._next = stream, 0.0

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            print(f"preparing data: {line}", file=self._stream, flush=True)
            self._next = now + PREPARATION_SECONDS


def _run_sweep(
    options: argparse.Namespace,
    stage: Stage,
    store: Store,
    display: ProgressDisplay,
    on_result: Callable[[str], None],
) -> Summary:
    """Run a stage of a sweep and those that follow it, with one executor."""
    sweep, missing = stage.plan.sweep, trials_to_run(stage.plan, options.retry_failed)
    command = _redact_command(options)
    may_run = bool(missing) or sweep.search is not None or not stage.is_last
    with contextlib.suppress(UsageError, StoreError):  # no description, or one to be written anew
        may_run = may_run or bool(plan_retiming(stage.plan, store, options.retime).sessions)
    origin, stop_flag = capture_origin(command), store.new_driver_stop_flag(sweep.name)
    stop_flags = store.stop_flag(sweep.name), stop_flag
    display.print_line(f"{_name_stage(stage)}: {stage.plan.format_totals()}")
    executor = _make_executor(options, store, origin, stop_flags, may_run)
    seen_kinds: set[bool] = set()
    plans = [stage.plan]

    def run_stage(one: Stage) -> Summary:
        plans.append(one.plan)
        is_first = one.is_tuning not in seen_kinds  # in later stages it failed just now
        seen_kinds.add(one.is_tuning)
        if one is not stage:
            display.begin_stage(one.plan, retry_failed=options.retry_failed and is_first)
        driver_options = {
            "origin": origin,
            "stop_flag": stop_flag,
            "on_result": on_result,
            "retry_failed": options.retry_failed and is_first,
        }
        return _run_stage(options, one, store, executor, display, command, driver_options)

    is_forced = True
    try:
        if options.address and may_run:
            folder = store.sweep_directory(sweep.name)
            check_store_is_shared(store.path, folder, executor.run_on_all_machines)
        location = f" on {executor.describe()}" if may_run else ""
        trials = _describe_missing(stage.plan, len(missing))
        display.print_line(f"{trials}{location}; record in {options.store}")
        summary = run_stages(stage, run_stage, partial(_plan_next_stage, sweep, store, display))
        if not (summary.stopped or summary.states["missing"] or summary.has_more):
            started = time.monotonic()
            is_over = time_again(
                plans[-1], store, executor, origin, stop_flag, display.print_line,
                repeat=options.retime,
            )  # fmt: skip
            seconds = summary.seconds + time.monotonic() - started
            summary = replace(summary, seconds=seconds, stopped=not is_over, has_more=not is_over)
        is_forced = False
        return _add_tuning_trials(summary, store, sweep.name)
    finally:
        executor.close(force=is_forced)


def _add_tuning_trials(summary: Summary, store: Store, sweep: str) -> Summary:
    """Count the trials that found the rates of a design beside its own, as `kvlab status` does."""
    tuning = store.sweep(sweep).get("tuning")
    if not tuning or not tuning["is_over"]:
        return summary
    trials = {trial for cell in tuning["cells"] for trial in cell["trials"].values()}
    ended = Counter(filter(None, (ended_status(store, trial) for trial in trials)))
    return replace(summary, states=summary.states + Counter[str](ended))


def _run_stage(
    options: argparse.Namespace,
    stage: Stage,
    store: Store,
    executor: Executor,
    display: ProgressDisplay,
    command: str,
    driver_options: dict[str, Any],
) -> Summary:
    """Run one stage with a driver of its own."""
    sweep = stage.plan.sweep
    yaml, experiment_yaml = sweep.source.document.text, sweep.source.base_document.text

    def describe(planned: Plan) -> dict[str, Any]:
        own = replace(stage, plan=planned)
        return describe_stage(own, yaml=yaml, experiment_yaml=experiment_yaml, command=command)

    planned = stage.plan
    search = None if sweep.search is None else Searcher(planned, store, describe)
    if search is not None:
        promote_trials(search, store, options.promote)
        planned = search.plan
    driver = Driver(
        planned,
        store,
        executor,
        description=describe(planned) if search is None else search.describe(),
        prepare=_make_preflight(
            options, planned, store, executor, driver_options["origin"], display
        ),
        on_event=display.handle_event,
        source=search,
        **driver_options,
    )
    with stop_on_signal(driver.stop), display.watch(driver):
        summary = driver.run()
    if search is not None:
        search.finish()
        results = SearchResults(store.sweep(sweep.name)["search"])
        display.print_line("\n".join(format_search(results)))
        if results.stop_reason and results.eligible:
            display.print_line(suggest_confirmation(sweep))
    return summary


def _plan_next_stage(sweep: Sweep, store: Store, display: ProgressDisplay) -> Stage:
    """Plan the next stage from the record, and print what was decided."""
    stage = plan_stage(sweep, store)
    for line in stage.lines:
        display.print_line(line)
    if trials_to_run(stage.plan):
        display.print_line(f"{_name_stage(stage)}: {stage.plan.format_totals()}")
    return stage


def _name_stage(stage: Stage) -> str:
    name = stage.plan.sweep.name
    return f"{name}, {stage.name}" if stage.name else name


def _make_preflight(
    options: argparse.Namespace,
    planned: Plan,
    store: Store,
    executor: Executor,
    origin: Origin,
    display: ProgressDisplay,
) -> PrepareTrials:
    """Return what the driver calls before the first trial: memory check, data, smoke tests.

    Raises:
        UsageError: If a search shares GPUs by memory; its trials are not known in advance.
    """
    shares_gpus = any(one.trial.experiment.resources.gpus == "auto" for one in planned.trials)
    if shares_gpus and planned.sweep.search is not None:
        text = "resources.gpus = auto is measured before trials start, and a search finds its"
        raise UsageError(f"{text} trials as it goes; write a number, such as 0.5")
    warn = display.print_line
    smoke_tests = SmokeTests(store, planned.sweep.name, executor, origin, warn, options.smoke)
    one_at_a_time = EXECUTORS[options.executor].runs_in_process or planned.sweep.search is not None

    def prepare(missing: list[PlannedTrial], check_stop: Callable[[], None]) -> list[PlannedTrial]:
        for line in check_memory(missing, _measure_memories(options, executor), one_at_a_time):
            warn(line)
        if not options.address:  # the machines of a cluster have data folders of their own
            prefetch_evaluation_sets(missing, display.report_preparation)
            check_stop()
        display.end_preparation()
        suggestions = count_remaining_suggestions(planned, store)
        budget = estimate_budget(planned, store, suggestions=suggestions)
        smoke_tests.flops_per_second = (
            budget.rate.flops_per_second if budget and budget.rate else None
        )
        return smoke_tests(missing, check_stop)

    return prepare


def _measure_memories(options: argparse.Namespace, executor: Executor) -> list[MachineMemory]:
    """Return the memory of the machines that trials may run on, if they answer."""
    answers = [measure_machine_memory()]
    if options.address:
        replies = executor.run_on_all_machines(measure_machine_memory, "").values()
        answers = [reply for reply in replies if isinstance(reply, str)]
    return [MachineMemory(**json.loads(answer)) for answer in answers]


def _redact_command(options: argparse.Namespace) -> str:
    """Return the command that computes the same again, without paths of this machine."""
    is_default = options.executor == DEFAULT_EXECUTOR
    executor = [] if is_default else ["--executor", options.executor]
    file = os.path.abspath(find_sweep_file(options.sweep))
    in_project = os.path.relpath(file, find_project_root())
    file = file if in_project.startswith(os.pardir) else in_project
    scale = ["--scale", options.scale] if options.scale else []
    return redact_command(["submit", file, *scale, *executor])


def _make_executor(
    options: argparse.Namespace,
    store: Store,
    origin: Origin,
    stop_flags: Sequence[Path],
    may_run: bool,
) -> Executor:
    name = options.executor if may_run else IDLE_EXECUTOR
    capture_output = not EXECUTORS[name].runs_in_process
    run_one: RunTask = partial(
        run_task,
        store=store.path,
        origin=origin,
        stop_flags=stop_flags,
        capture_output=capture_output,
        wait=False,
    )
    return make_executor(name, run_one, options.address if may_run else None)


def _describe_missing(planned: Plan, missing: int) -> str:
    ended = len(planned.trials) - missing
    if planned.sweep.search is not None:
        return f"{ended} ended before, {missing} to run and what the search suggests"
    return f"{ended} ended before, {missing} to run" if missing else "nothing is missing"


def _print_summary(sweep: str, store: Store, summary: Summary, stream: TextIO) -> None:
    states = summary.states
    parts = [f"{states['done']} done", f"{states['failed']} failed"]
    parts += [
        f"{states[state]} {state}" for state in ("diverged", "pruned", "missing") if states[state]
    ]
    print(f"{', '.join(parts)} in {format_duration(summary.seconds)}", file=stream)
    if states["failed"]:
        for trial_id in store.sweep_trials(sweep):
            if store.status(trial_id) == "failed":
                print(f"  {trial_id}  {format_outcome(store, trial_id)}", file=stream)
        print("failed trials are not run again unless asked: --retry-failed", file=stream)
    if summary.exit_code == 130:
        print("stopped; submit again to go on from the last checkpoints", file=stream)


def _write_report_if_possible(
    options: argparse.Namespace, sweep: str, store: Store, warn: Callable[[str], None]
) -> tuple[Path, str] | tuple[None, None]:
    """Write the report, unless this machine lacks what draws it; the record is there anyway.

    Returns:
        The report's folder and its answer, see `kvlab.report.answer_text`.
    """
    try:
        return _write_report(options, sweep, store)
    except ModuleNotFoundError as error:
        text = f"no report: {error.name} is not installed here; the record is complete"
        warn(f"{text}, and `kvlab report {sweep}` writes the report where it is")
        return None, None


def _write_report(options: argparse.Namespace, sweep: str, store: Store) -> tuple[Path, str]:
    from kvlab.report import answer_text, write_study_report

    lock, said = store.report_lock(sweep), set[str]()

    def say_waiting() -> None:
        if not said:
            line = f"waiting: {lock.describe_wait(f'writes the report of {sweep}')}"
            print(line, file=sys.stderr, flush=True)
            said.add(line)

    with lock.hold(on_wait=say_waiting):  # several drivers may end at once
        study = Study.load(store, sweep)
        return write_study_report(store, study, Path(options.reports)), answer_text(study)
