"""Before the long work: one step of every distinct architecture, and how many share a GPU.

A baseline that trains for hours would keep the only device, so the tests come before it, its own
architecture first. They take seconds each; where trainings are short they are left out, unless
asked for. A broken architecture's trials are recorded as failed at once, and the others go on.
"""

import contextlib
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvlab.errors import StoreError
from kvlab.files import read_json
from kvlab.layout.packing import device_share, trials_per_device
from kvlab.sweep.executor import Ended, Executor
from kvlab.sweep.order import architecture
from kvlab.sweep.plan import PlannedTrial
from kvlab.trial.failure import OUT_OF_MEMORY, Failure
from kvlab.trial.fingerprint import fingerprint
from kvlab.trial.origin import Origin
from kvlab.trial.record import Store
from kvlab.trial.smoke import SmokeAnswer, SmokeTest, record_smoke_failure
from kvlab.trial.start import ID_LENGTH

WORTH_SECONDS = 300.0
"""Of the longest training, from which on the tests are made without being asked for."""

FASTEST = {"cpu": 1e11, "gpu": 4e14}
"""FLOPs a second that no core and no GPU trains faster with: where nothing was measured yet, a
training takes at least its FLOPs divided by these."""

WAIT_SECONDS = 0.5

_LEFT_TO_THE_TRIAL = (*OUT_OF_MEMORY, "diverged")
"""A trial has its own way with these: a smaller microbatch, and a finding."""


@dataclass
class Smoke:
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
        self.say(f"smoke test: one step of {_count(len(groups), 'architecture')}")
        answers = self._run({key: group[0] for key, group in groups.items()}, check_stop)
        settled: dict[str, PlannedTrial] = {}
        broken = 0
        for key, group in groups.items():
            answer = answers.get(key)
            if answer is not None and self._is_broken(answer):
                broken += 1
                for planned in group:
                    record_smoke_failure(planned.trial, self.store, self.origin, answer)
            settled |= {planned.trial.id: _settle(planned, answer) for planned in group}
        self.say(self._summary(broken, list(answers.values())))
        return [settled.get(planned.trial.id, planned) for planned in missing]

    def _groups(self, missing: Sequence[PlannedTrial]) -> dict[str, list[PlannedTrial]]:
        """Trials by what a test of them would do; those alone that are to be tested."""
        groups: dict[str, list[PlannedTrial]] = {}
        for planned in missing:
            groups.setdefault(smoke_key(planned), []).append(planned)
        if self.asked or (self.asked is None and self._pays(missing, len(groups))):
            return groups
        packed = (key for key, group in groups.items() if _is_packed(group[0]))
        return {key: groups[key] for key in packed}

    def _pays(self, missing: Sequence[PlannedTrial], architectures: int) -> bool:
        """Not for one architecture, which the first trial shows as soon."""
        return architectures > 1 and any(
            planned.trains and seconds_at_least(planned, self.rate) > WORTH_SECONDS
            for planned in missing
        )

    def _run(
        self, chosen: dict[str, PlannedTrial], check_stop: Callable[[], None]
    ) -> dict[str, SmokeAnswer]:
        """Answers by key; none for a test whose process died, which the trials will tell."""
        # of this run alone: another driver of the sweep may test the same
        folder = self.store.sweep_directory(self.sweep) / "smoke" / uuid.uuid4().hex[:8]
        tests = {
            key: SmokeTest.like(planned.trial, folder / f"{key}.json")
            for key, planned in chosen.items()
        }
        waiting, running = list(tests.values()), dict[str, SmokeTest]()
        answers: dict[str, SmokeAnswer] = {}
        by_id = {test.id: key for key, test in tests.items()}
        while waiting or running:
            check_stop()
            while waiting and self.executor.has_room(waiting[0].experiment.resources):
                test = waiting.pop(0)
                running[test.id] = test
                self.executor.start(test)
            for ended in self.executor.wait(WAIT_SECONDS):
                answer = _answer(running.pop(ended.trial_id), ended)
                if answer is not None:
                    answers[by_id[ended.trial_id]] = answer
        for emptied in (folder, folder.parent):
            with contextlib.suppress(OSError):  # another driver's are in it, or none were written
                emptied.rmdir()
        return answers

    def _is_broken(self, answer: SmokeAnswer) -> bool:
        return answer.failure is not None and answer.failure["class"] not in _LEFT_TO_THE_TRIAL

    def _summary(self, broken: int, answers: list[SmokeAnswer]) -> str:
        peaks = [answer.peak_bytes for answer in answers if answer.peak_bytes]
        peak = f"; at most {max(peaks) / 1e9:.3g} GB of memory" if peaks else ""
        shown = f"{broken} broken" if broken else "none broken"
        return f"smoke test: {shown}{peak}"


def smoke_key(planned: PlannedTrial) -> str:
    """Names what a test does: what is built, how it is served, and how a step goes through it."""
    experiment = planned.trial.experiment
    training = experiment.training
    step = [training.batch_tokens, training.precision, training.compile, training.steps > 0]
    facts = [architecture(planned), step, experiment.resources.model_dump(mode="json")]
    return fingerprint({"smoke": json.dumps(facts)})[:ID_LENGTH]


def seconds_at_least(planned: PlannedTrial, rate: float | None) -> float:
    """About how long a trial's training takes; without a measured rate, at least so long."""
    resources = planned.trial.experiment.resources
    if rate is None:
        devices = resources.devices
        rate = FASTEST["gpu"] * devices if devices else FASTEST["cpu"] * resources.cpus
    return planned.flops / rate


def _is_packed(planned: PlannedTrial) -> bool:
    return planned.trial.experiment.resources.gpus == "auto"


def _settle(planned: PlannedTrial, answer: SmokeAnswer | None) -> PlannedTrial:
    """With ``gpus: auto`` as the measured memory allows; a whole GPU if nothing was measured."""
    if not _is_packed(planned):
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


def _answer(test: SmokeTest, ended: Ended) -> SmokeAnswer | None:
    """What a test wrote; or, of one that could not, what kept it from running."""
    if isinstance(ended.error, StoreError):
        raise ended.error
    if ended.outcome is None:
        if isinstance(ended.error, MemoryError):
            return SmokeAnswer(failure=Failure.of(ended.error).as_dict())
        return None
    path = Path(test.answer)
    try:
        return SmokeAnswer(**read_json(path))
    except FileNotFoundError:
        text = f"{path} was not written; workers and driver must share the store"
        raise StoreError(text) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
