"""Before the long work: one step of every distinct architecture, and how many share a GPU.

A baseline that trains for hours would keep the only device, so the tests come before it, its own
architecture first. They take seconds each; where trainings are short they are left out, unless
asked for. A broken architecture's trials are recorded as failed at once, and the others go on.
"""

import contextlib
import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvlab.data import get_hellaswag_file, prepare_dataset
from kvlab.errors import StoreError
from kvlab.fs.atomic_files import read_json
from kvlab.humanize import format_count
from kvlab.layout.gpu_sharing import device_share, trials_per_device
from kvlab.store import Store
from kvlab.store.failure import OUT_OF_MEMORY, Failure
from kvlab.store.provenance import Origin
from kvlab.sweep.driver.trial_queue import architecture_key
from kvlab.sweep.executors.executor import EndedTask, Executor
from kvlab.sweep.planning.planner import PlannedTrial
from kvlab.trial.finalize import record_smoke_failure
from kvlab.trial.fingerprint import ID_LENGTH, fingerprint
from kvlab.trial.smoke_test import SmokeResult, SmokeTest

MIN_TRAINING_SECONDS = 300.0
"""Of the longest training, from which on the tests are made without being asked for."""

MAX_TRAINING_FLOPS = {"cpu": 1e11, "gpu": 4e14}
"""FLOPs a second that no core and no GPU trains faster with: where nothing was measured yet, a
training takes at least its FLOPs divided by these."""

WAIT_SECONDS = 0.5

_HANDLED_BY_TRIAL = (*OUT_OF_MEMORY, "diverged")
"""A trial has its own way with these: a smaller microbatch, and a finding."""


@dataclass
class SmokeTests:
    """The smoke tests of one sweep.

    Args:
        store, sweep: where the answers lie while they matter.
        executor: runs them; idle.
        origin: of this run, for failures.
        say: takes lines for a person.
        asked: whether they were asked for; None: where they pay.
        rate: measured training FLOPs a second of a trial, if known.
    """

    store: Store
    sweep: str
    executor: Executor
    origin: Origin
    say: Callable[[str], None]
    asked: bool | None = None
    rate: float | None = None

    def __call__(
        self, missing: Sequence[PlannedTrial], check_stop: Callable[[], None]
    ) -> list[PlannedTrial]:
        """Tests what ``missing`` is made of; records what is broken.

        Returns:
            All of ``missing``, with ``gpus: auto`` settled.

        Raises:
            Stopped: by ``check_stop``, which is called now and then.
            StoreError: nothing can be recorded.
        """
        groups = self._groups(missing)
        if not groups:
            return list(missing)
        self.say(f"smoke test: one step of {format_count(len(groups), 'architecture')}")
        answers = self._run({key: group[0] for key, group in groups.items()}, check_stop)
        settled: dict[str, PlannedTrial] = {}
        broken = 0
        for key, group in groups.items():
            answer = answers.get(key)
            if answer is not None and self._is_broken(answer):
                broken += 1
                for planned in group:
                    record_smoke_failure(planned.trial, self.store, self.origin, answer)
            settled |= {planned.trial.id: _settle_gpu_share(planned, answer) for planned in group}
        self.say(self._summary(broken, list(answers.values())))
        return [settled.get(planned.trial.id, planned) for planned in missing]

    def _groups(self, missing: Sequence[PlannedTrial]) -> dict[str, list[PlannedTrial]]:
        """Trials by what a test of them would do; those alone that are to be tested."""
        groups: dict[str, list[PlannedTrial]] = {}
        for planned in missing:
            groups.setdefault(smoke_test_key(planned), []).append(planned)
        if self.asked or (self.asked is None and self._pays(missing, len(groups))):
            return groups
        packed = (key for key, group in groups.items() if _shares_gpu_automatically(group[0]))
        return {key: groups[key] for key in packed}

    def _pays(self, missing: Sequence[PlannedTrial], architectures: int) -> bool:
        """Not for one architecture, which the first trial shows as soon."""
        return architectures > 1 and any(
            planned.trains and estimate_training_seconds(planned, self.rate) > MIN_TRAINING_SECONDS
            for planned in missing
        )

    def _run(
        self, chosen: dict[str, PlannedTrial], check_stop: Callable[[], None]
    ) -> dict[str, SmokeResult]:
        """Answers by key; none for a test whose process died, which the trials will tell."""
        # of this run alone: another driver of the sweep may test the same
        folder = self.store.sweep_directory(self.sweep) / "smoke" / uuid.uuid4().hex[:8]
        tests = {
            key: SmokeTest.of(planned.trial, folder / f"{key}.json")
            for key, planned in chosen.items()
        }
        waiting, running = list(tests.values()), dict[str, SmokeTest]()
        answers: dict[str, SmokeResult] = {}
        by_id = {test.id: key for key, test in tests.items()}
        while waiting or running:
            check_stop()
            while waiting and self.executor.has_room(waiting[0].resources):
                test = waiting.pop(0)
                running[test.id] = test
                self.executor.start(test)
            for ended in self.executor.wait(WAIT_SECONDS):
                answer = _read_answer(running.pop(ended.task_id), ended)
                if answer is not None:
                    answers[by_id[ended.task_id]] = answer
        for emptied in (folder, folder.parent):
            with contextlib.suppress(OSError):  # another driver's are in it, or none were written
                emptied.rmdir()
        return answers

    def _is_broken(self, answer: SmokeResult) -> bool:
        return answer.failure is not None and answer.failure.kind not in _HANDLED_BY_TRIAL

    def _summary(self, broken: int, answers: list[SmokeResult]) -> str:
        peaks = [answer.peak_bytes for answer in answers if answer.peak_bytes]
        peak = f"; at most {max(peaks) / 1e9:.3g} GB of memory" if peaks else ""
        shown = f"{broken} broken" if broken else "none broken"
        return f"smoke test: {shown}{peak}"


def smoke_test_key(planned: PlannedTrial) -> str:
    """Names what a test does: what is built, how it is served, and how a step goes through it."""
    experiment = planned.trial.experiment
    training = experiment.training
    step = [training.batch_tokens, training.precision, training.compile, training.steps > 0]
    facts = [architecture_key(planned), step, experiment.resources.model_dump(mode="json")]
    return fingerprint({"smoke": json.dumps(facts)})[:ID_LENGTH]


def estimate_training_seconds(planned: PlannedTrial, rate: float | None) -> float:
    """About how long a trial's training takes; without a measured rate, at least so long."""
    resources = planned.trial.experiment.resources
    if rate is None:
        devices = resources.devices
        rate = (
            MAX_TRAINING_FLOPS["gpu"] * devices
            if devices
            else MAX_TRAINING_FLOPS["cpu"] * resources.cpus
        )
    return planned.flops / rate


def _shares_gpu_automatically(planned: PlannedTrial) -> bool:
    return planned.trial.experiment.resources.gpus == "auto"


def _settle_gpu_share(planned: PlannedTrial, answer: SmokeResult | None) -> PlannedTrial:
    """With ``gpus: auto`` as the measured memory allows; a whole GPU if nothing was measured."""
    if not _shares_gpu_automatically(planned):
        return planned
    count, microbatch = 1, None
    if answer is not None and answer.peak_bytes and answer.device_bytes:
        count = trials_per_device(answer.peak_bytes, answer.device_bytes)
        microbatch = answer.microbatch_tokens  # what was measured, also on a part of the device
    experiment = planned.trial.experiment
    changed = {"gpus": device_share(count)}
    resources = experiment.resources.model_copy(
        update={**changed, **({"microbatch_tokens": microbatch} if microbatch else {})}
    )
    trial = replace(
        planned.trial, experiment=experiment.model_copy(update={"resources": resources})
    )
    return replace(planned, trial=trial)


def _read_answer(test: SmokeTest, ended: EndedTask) -> SmokeResult | None:
    """What a test wrote; or, of one that could not, what kept it from running."""
    if isinstance(ended.error, StoreError):
        raise ended.error
    if ended.outcome is None:
        if isinstance(ended.error, MemoryError):
            return SmokeResult(failure=Failure.from_error(ended.error))
        return None
    path = Path(test.result_path)
    try:
        return SmokeResult.from_json(read_json(path))
    except FileNotFoundError:
        text = f"{path} was not written; workers and driver must share the store"
        raise StoreError(text) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


# Text and evaluation sets, made ready once before the trials that need them start.


def prefetch_data(
    missing: Iterable[PlannedTrial], say: Callable[[str], None], check_stop: Callable[[], None]
) -> None:
    """Prepares every distinct text of ``missing``, and HellaSwag if one of them scores it.

    Workers could do it themselves, since making them is locked; but all would wait for one,
    each holding its cores, and an evaluation set that cannot be had would be noticed only after
    hours of training.

    Args:
        say: takes lines for a person.
        check_stop: called with each of them; what it raises ends the preparation, which goes on
            from there the next time.

    Raises:
        DataError: some text or set cannot be had.
    """

    def report(line: str) -> None:
        say(line)
        check_stop()

    experiments = [planned.trial.experiment for planned in missing]
    for data in dict.fromkeys(experiment.data for experiment in experiments):
        check_stop()
        prepare_dataset(data, report)
    if any(experiment.evaluation.hellaswag_items != 0 for experiment in experiments):
        check_stop()
        get_hellaswag_file(report)
