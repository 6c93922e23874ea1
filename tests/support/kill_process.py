"""Run a function in a process that is killed between two of the files that it writes."""

import itertools
import multiprocessing
import os
import signal


def count_deaths(run, rng, fewest=5, most=45, calls=("replace", "link")):
    """Call ``run()`` in processes that are killed at a random written file, until one ends well.

    Args:
        run: Goes on where the last process was killed.
        rng: Draws the number of the file, from ``fewest`` to ``most``.
        calls: Functions of `os` that are counted, each after it is done. Results are linked.

    Returns:
        How many processes were killed.
    """
    fork = multiprocessing.get_context("fork")
    deaths, code = -1, -signal.SIGKILL
    while code == -signal.SIGKILL:
        deaths += 1
        child = fork.Process(target=_run_until, args=(run, rng.randint(fewest, most), calls))
        child.start()
        child.join()
        code = child.exitcode
    assert code == 0
    return deaths


def _run_until(run, writes, calls):
    """Run in this process, which is killed after the ``writes``-th of these calls."""
    count = itertools.count(1)

    def add_death(move):
        def move_and_die(*arguments):
            move(*arguments)
            if next(count) == writes:
                os.kill(os.getpid(), signal.SIGKILL)

        return move_and_die

    for name in calls:
        setattr(os, name, add_death(getattr(os, name)))
    run()
