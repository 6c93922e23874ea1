"""Pieces made in several processes.

These are plain children that talk over pipes. A fork of a process that holds torch or Ray may
hang, and a spawned one runs the caller's main module again; these do neither.
"""

import json
import os
import queue
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType

from kvlab.data.pieces import Job, write_piece
from kvlab.errors import DataError


class Workers:
    """``count`` processes; with one, the work is done right here when it is asked for."""

    def __init__(self, count: int):
        self.count = count
        self._children: list[subprocess.Popen[str]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count) if count > 1 else None

    def __enter__(self) -> "Workers":
        return self

    def submit(self, job: Job) -> "Future[None]":
        """The piece of ``job``, when it is written; the future raises what `write_piece` does."""
        if self._threads is not None:
            return self._threads.submit(self._ask, job)
        done: Future[None] = Future()
        write_piece(job)
        done.set_result(None)
        return done

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._threads is None:
            return
        # What is under way is no longer wanted: either all is there, or all is lost.
        for child in self._children:
            child.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for child in self._children:
            child.kill()  # also one that a thread was about to start
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with suppress(OSError):  # unsent words to a child that is gone
                        pipe.close()

    def _ask(self, job: Job) -> None:
        child = self._free_child()
        try:
            answer = _exchange(child, json.dumps(asdict(job)))
        finally:
            self._idle.put(child)
        if "refused" in answer:
            raise DataError(answer["refused"])
        if "broken" in answer:
            raise RuntimeError(f"a tokenising process failed:\n{answer['broken']}")

    def _free_child(self) -> "subprocess.Popen[str]":
        # As many threads as children at most, so one without a free child may start one.
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            child = _start()
            self._children.append(child)
            return child


def available_cpus() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start() -> "subprocess.Popen[str]":
    # The child finds what we import, however we came to find it.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", "from kvlab.data.worker import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _exchange(child: "subprocess.Popen[str]", question: str) -> dict[str, str]:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(f"{question}\n")
        child.stdin.flush()
        answer = child.stdout.readline()
    except OSError:
        answer = ""
    if not answer:
        text = f"a tokenising process ended early (exit status {child.wait()})"
        raise DataError(f"{text}; it may have run out of memory; run again, it goes on")
    found: dict[str, str] = json.loads(answer)
    return found
