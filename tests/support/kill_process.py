"""Run a function in a process that is killed between two of the files that it writes."""

import itertools
import multiprocessing
import os
import signal


def count_deaths(run, rng, fewest=5, most=45):
    """Call ``run()`` in processes that are killed at a random written file, until one ends.

    Args:
        run: Goes on where the last process was killed.
        rng: Draws the number of the file, from ``fewest`` to ``most``.

    Returns:
        How many processes were killed.
    """
    fork = multiprocessing.get_context("fork")
    deaths, code = -1, -signal.SIGKILL
    while code == -signal.SIGKILL:
        deaths += 1
        child = fork.Process(target=_run_until, args=(run, rng.randint(fewest, most)))
        child.start()
        child.join()
        code = child.exitcode
    assert code == 0
    return deaths


def _run_until(run, writes):
    """Run in this process, which is killed at the ``writes``-th file that it writes."""
    count = itertools.count(1)

    def add_death(move):
        def move_and_die(*paths):
            move(*paths)
            if next(count) == writes:
                os.kill(os.getpid(), signal.SIGKILL)

        return move_and_die

    os.replace, os.link = add_death(os.replace), add_death(os.link)  # results are linked
    run()
