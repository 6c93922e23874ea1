"""`kvlab submit`: run the missing trials of a sweep, write its report, publish both."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from kvlab.analysis.study import Study
from kvlab.cli import shared_arguments as shared
from kvlab.cli.progress_display import ProgressDisplay, format_outcome
from kvlab.cli.sweep_publishers import collect_outcome, find_publishers, tell_end
from kvlab.cli.terminal import print_answer, tolerate_broken_output
from kvlab.errors import StoreError, UsageError
from kvlab.fs.lock import seems_held
from kvlab.humanize import format_count, format_duration
from kvlab.own_extensions import find_member
from kvlab.store import Store, provenance, verification
from kvlab.store.store import find_preparing_cells
from kvlab.sweep import Driver, Plan, PlannedTrial, Stage, Summary, plan_stage
from kvlab.sweep.driver import driver_registry, preparation, retiming
from kvlab.sweep.driver.driver import run_stages
from kvlab.sweep.executors import DEFAULT_EXECUTOR, EXECUTORS, IDLE_EXECUTOR, make_executor
from kvlab.sweep.executors.executor import Executor, RunTask
from kvlab.sweep.planning import budget, code_review, planner, stages, texts
from kvlab.trial.code_identity import this_code
from kvlab.trial.known_extensions import remember_extensions
from kvlab.trial.run import run_task

PREPARATION_SECONDS = 10.0
"""Time between two lines about the preparation of text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_record(parser, "name or file of a sweep")
    shared.add_scale(parser)
    text = "; ".join(f"{name}: {entry.summary}" for name, entry in EXECUTORS.items())
    parser.add_argument("--executor", choices=list(EXECUTORS), default=DEFAULT_EXECUTOR, help=text)
    parser.add_argument("--address", help="a running Ray cluster (default: start a local one)")
    text = "run a step of every architecture first (default: if a training takes over 5 minutes)"
    parser.add_argument("--smoke", action=argparse.BooleanOptionalAction, help=text)
    shared.add_flag(parser, "--retry-failed", "also run trials that failed before")
    text = "results of other code: compare them with new ones all the same, or run them again"
    parser.add_argument("--code", choices=("mix", "rerun"), help=text)
    shared.add_flag(parser, "--retime", "time trials again whose timings were disturbed")
    shared.add_list(parser, "--promote", "TRIAL", "train a pruned trial of the search to its end")
    shared.add_flag(parser, "--no-report", "write no report at the end")
    shared.add_reports(parser)
    for publisher in find_publishers().values():
        publisher.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    if options.address is not None and not EXECUTORS[options.executor].takes_address:
        names = " or ".join(name for name, entry in EXECUTORS.items() if entry.takes_address)
        raise UsageError(f"--address = {options.address} needs --executor {names}; leave out one")
    with tolerate_broken_output():
        return _submit(options)


def _submit(options: argparse.Namespace) -> int:
    began = time.monotonic()
    sweep = shared.read_sweep(options.sweep, options.scale)
    if options.promote and not planner.uses_pruning(sweep):
        text = f"--promote = {options.promote[0]} needs a search with pruning"
        raise UsageError(f"{text}, and {sweep.name} prunes nothing; leave it out")
    store = Store(Path(options.store).absolute())
    for publisher in find_publishers().values():
        publisher.check(options, store)
    stream = sys.stderr if options.json else sys.stdout
    say = partial(print, file=stream, flush=True)
    for damage in verification.heal(store.sweep_directory(sweep.name)) or ():
        say(f"healed  {damage}")
    if options.retry_failed:
        stages.reopen_preparations(store, sweep.name)
    next_line = 0.0

    def print_slowly(line: str) -> None:
        nonlocal next_line
        if time.monotonic() >= next_line:
            say(f"preparing data: {line}")
            next_line = time.monotonic() + PREPARATION_SECONDS

    identify = partial(texts.prepare_text, on_progress=print_slowly)
    stage = _choose_code(options, plan_stage(sweep, store, identify=identify), store, say)
    display = ProgressDisplay(sweep.name, store, stream)
    warn = display.print_line
    for note in stage.plan.notes:
        warn(f"note: {note}")
    makers = find_publishers().items()
    publishers = {key: make(options, store, sweep.name, warn) for key, make in makers}

    def on_result(trial_id: str) -> None:
        for one in publishers.values():
            one.on_result(trial_id)

    notice = {"sweep": sweep.name, "store": str(store.path)}
    with tell_end(list(publishers.values()), notice):
        summary = _SweepRun(options, stage, store, display, on_result).run()
        facts: dict[str, Any] = {"sweep": sweep.name, "states": dict(summary.states)}
        seconds = time.monotonic() - began
        _print_summary(sweep.name, store, summary, seconds, stream)
        report = answer = None
        if summary.exit_code != 130 and not options.no_report:
            report, answer = _write_report(options, sweep.name, store, warn)
            facts["report"] = None if report is None else str(report)
            facts["answer"] = answer
        published = {key: one.finish(report) for key, one in publishers.items()}
        facts |= {key: found for key, found in published.items() if found is not None}
        notice |= facts | collect_outcome(summary, seconds)
    if report is not None and answer is not None:
        print_answer(answer, report, stream)
    if options.json:
        print(json.dumps(facts, indent=1))
    return summary.exit_code


def _choose_code(
    options: argparse.Namespace, stage: Stage, store: Store, say: Callable[[str], None]
) -> Stage:
    """Return a stage to run, which does not mix code unless that was asked for.

    Raises:
        UsageError: To go on would mix code, and ``--code`` does not say what to do; or its trials
            cannot run again, see `code_review.run_again`.
    """
    review = code_review.review_code(stage, store, options.retry_failed)
    found, sweep = review.describe(), stage.plan.sweep
    if found and options.code == "rerun":
        stages.reopen_preparations(store, sweep.name, review.others)
        code_review.run_again(stage, review, store)
        say(f"code: {found}; they run again, and what is there is kept aside")
        return plan_stage(sweep, store)
    if review.is_mixing and options.code is None:
        text = f"--code is not given: {found}, and {format_count(review.to_run, 'trial')} to run"
        hint = "use --code rerun to run the former again (what is there is kept aside)"
        text = f"{text} would mix code in one comparison; {hint}, or --code mix to go on"
        raise UsageError(f"{text}; `kvlab plan {options.sweep}` lists them")
    if found:
        hint = "" if options.code else "; --code rerun runs them again"
        say(f"code: {found}{hint}")
    return stage


@dataclass
class _SweepRun:
    """Run a stage of a sweep and those that follow it, with one executor.

    Attributes:
        options: Of the command.
        stage: The first stage.
        store: Where the trials are recorded.
        display: Shows the progress.
        on_result: Called with the id of every trial that has ended.
    """

    options: argparse.Namespace
    stage: Stage
    store: Store
    display: ProgressDisplay
    on_result: Callable[[str], None]

    def __post_init__(self) -> None:
        options, self._sweep = self.options, self.stage.plan.sweep
        self._command = write_command(options)
        code = None if options.code == "mix" else this_code()._asdict()
        self._origin = provenance.capture_origin(self._command, code)
        self._stop_flag = self.store.new_driver_stop_flag(self._sweep.name)
        self._last_plan = self.stage.plan
        self._begun: set[bool] = set()  # preparing or not: kinds of stages that were run
        self._say = self.display.print_line
        self._executor: Executor

    def run(self) -> Summary:
        """Run the stages, then time again what has to be."""
        options, store, stage = self.options, self.store, self.stage
        remember_extensions(file.text for file in self._sweep.base.extensions)
        name, is_search = self._sweep.name, self._sweep.search is not None
        self._say(f"{_name_stage(stage)}: {stage.plan.format_totals()}")
        missing = len(planner.trials_to_run(stage.plan, options.retry_failed))
        may_run = bool(missing) or is_search or not stage.is_last
        with contextlib.suppress(UsageError, StoreError):  # no description, or one to write anew
            may_run = may_run or bool(retiming.plan_retiming(stage.plan, store, options.retime)[0])
        executor_name = options.executor if may_run else IDLE_EXECUTOR
        run_one: RunTask = partial(
            run_task,
            store=store.path,
            origin=self._origin,
            stop_flags=(store.stop_flag(name), self._stop_flag),
            capture_output=not EXECUTORS[executor_name].runs_in_process,
            wait=False,
        )
        address = options.address if may_run else None
        self._executor = executor = make_executor(executor_name, run_one, address)
        is_forced = True
        try:
            if address:
                preparation.check_store_is_shared(
                    store.path, store.sweep_directory(name), executor.run_on_all_machines
                )
            location = f" on {executor.describe()}" if may_run else ""
            to_run = "nothing is missing"
            if missing or is_search:
                to_run = f"{len(stage.plan.trials) - missing} ended before, {missing} to run"
            to_run += " and what the search suggests" if is_search else ""
            self._say(f"{to_run}{location}; record in {options.store}")
            summary = run_stages(stage, self._run_stage, self._plan_next_stage)
            if not (summary.stopped or summary.states["missing"] or summary.has_more):
                is_over = retiming.time_again(
                    self._last_plan, store, executor, self._origin, self._stop_flag, self._say,
                    repeat=options.retime,
                )  # fmt: skip
                summary = replace(summary, stopped=not is_over, has_more=not is_over)
            is_forced = False
        finally:
            executor.close(force=is_forced)
        # count the trials that found settings of a design, too, as `kvlab status` does
        cells = chain(*find_preparing_cells(store.sweep(name)).values())
        trials = {trial for cell in cells for trial in cell["trials"].values()}
        trials -= {one.trial.id for one in self._last_plan.trials}
        states = Counter(summary.states)
        states.update(filter(None, (planner.ended_status(store, trial) for trial in trials)))
        return replace(summary, states=states)

    def _run_stage(self, stage: Stage) -> Summary:
        """Run one stage with a driver of its own."""
        sweep, store, display, planned = self._sweep, self.store, self.display, stage.plan
        is_first = stage.is_preparing not in self._begun  # in later stages it failed just now
        retry_failed = self.options.retry_failed and is_first
        self._begun.add(stage.is_preparing)
        self._last_plan = planned

        describe = partial(
            planner.describe_stage,
            yaml=sweep.source.document.text,
            experiment_yaml=sweep.source.base_document.text,
            command=self._command,
            code=self._origin.code,
        )
        search = None
        if sweep.search is not None:
            search = find_member("search", "searcher")(planned, store, describe)
            for trial in self.options.promote:  # by the first digits of their ids
                search.promote(store.find_trial(trial))
            planned = search.plan
        driver = Driver(
            planned,
            store,
            self._executor,
            description=describe(stage if search is None else search.stage),
            prepare=partial(self._prepare, planned),
            on_event=display.handle_event,
            source=search,
            origin=self._origin,
            stop_flag=self._stop_flag,
            on_result=self.on_result,
            retry_failed=retry_failed,
        )
        with driver_registry.stop_on_signal(driver.stop), display.watch(driver):
            summary = driver.run()
        if search is not None:
            self._say("\n".join(search.finish()))
        return summary

    def _plan_next_stage(self) -> Stage:
        """Plan the next stage from the record, and print what was decided."""
        stage = plan_stage(self._sweep, self.store)
        stage = _choose_code(self.options, stage, self.store, self._say)
        for line in stage.lines:
            self._say(line)
        if planner.trials_to_run(stage.plan):
            self._say(f"{_name_stage(stage)}: {stage.plan.format_totals()}")
        return stage

    def _prepare(
        self, planned: Plan, missing: list[PlannedTrial], check_stop: Callable[[], None]
    ) -> list[PlannedTrial]:
        """Check memory, get data and run smoke tests before the first trial."""
        options = self.options
        measure = budget.measure_machine_memory
        if options.address:
            answers = self._executor.run_on_all_machines(measure, "").values()
            machines = [one for one in answers if isinstance(one, budget.MachineMemory)]
        else:
            machines = [measure()]
        one_at_a_time = EXECUTORS[options.executor].runs_in_process or planned.sweep.search
        for line in budget.check_memory(missing, machines, bool(one_at_a_time)):
            self._say(line)
        if not options.address:  # the machines of a cluster have data folders of their own
            preparation.prefetch_evaluation_sets(missing, self.display.report_preparation)
            check_stop()
        self.display.report_preparation("")
        costs = budget.estimate_budget(planned, self.store)
        return preparation.run_smoke_tests(
            missing, check_stop, self.store, self._executor, self._origin, self._say,
            requested=options.smoke,
            flops_per_second=costs.rate.flops_per_second if costs and costs.rate else None,
        )  # fmt: skip


def write_command(options: argparse.Namespace) -> str:
    """Return the command that computes the same again, without paths of this machine."""
    file = os.path.relpath(shared.find_sweep_file(options.sweep), shared.find_project_root())
    words = ["kvlab submit", os.path.basename(file) if file.startswith(os.pardir) else file]
    words += ["--scale", options.scale] if options.scale else []
    words += ["--executor", options.executor] if options.executor != DEFAULT_EXECUTOR else []
    return " ".join(words)


def _name_stage(stage: Stage) -> str:
    name = stage.plan.sweep.name
    return f"{name}, {stage.name}" if stage.name else name


def _print_summary(
    sweep: str, store: Store, summary: Summary, seconds: float, stream: TextIO
) -> None:
    states = summary.states
    parts = [
        f"{states[state]} {state}"
        for state in ("done", "failed", "diverged", "pruned", "missing")
        if states[state] or state in ("done", "failed")
    ]
    print(f"{', '.join(parts)} in {format_duration(seconds)}", file=stream)
    if states["failed"]:
        for trial_id in store.sweep_trials(sweep):
            if store.status(trial_id) == "failed":
                print(f"  {trial_id}  {format_outcome(store, trial_id)}", file=stream)
        print("failed trials are not run again unless asked: --retry-failed", file=stream)
    if summary.exit_code == 130:
        print("stopped; submit again to go on from the last checkpoints", file=stream)


def _write_report(
    options: argparse.Namespace, sweep: str, store: Store, warn: Callable[[str], None]
) -> tuple[Path, str] | tuple[None, None]:
    """Write the report, unless this machine lacks what draws it; the record is there anyway.

    Returns:
        The report's folder and its answer, see `kvlab.report.answer_text`.
    """
    lock = store.report_lock(sweep)
    try:
        from kvlab.report import answer_text, write_study_report

        if seems_held(lock.path):  # several drivers may end at once
            warn(f"waiting: {lock.describe_wait(f'writes the report of {sweep}')}")
        with lock.hold():
            study = Study.load(store, sweep)
            return write_study_report(store, study, Path(options.reports)), answer_text(study)
    except ModuleNotFoundError as error:
        text = f"no report: {error.name} is not installed here; the record is complete"
        warn(f"{text}, and `kvlab report {sweep}` writes the report where it is")
        return None, None
