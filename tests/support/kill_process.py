"""Processes that are killed before or after one of the files that they write."""

import itertools
import multiprocessing
import os
import signal


def die_at(moment, calls):
    """Let SIGKILL end this process at a beginning or an end of some calls.

    Args:
        moment: Number of the beginning or end, counted over all calls from 1.
        calls: Names of functions of `os`.
    """
    moments = itertools.count(1)

    def pass_moment():
        if next(moments) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def add_death(call):
        def call_and_die(*arguments):
            pass_moment()
            result = call(*arguments)
            pass_moment()
            return result

        return call_and_die

    for name in calls:
        setattr(os, name, add_death(getattr(os, name)))


def run_until(run, moment, calls):
    """Call ``run()`` in a process that dies, see `die_at`; return its exit code."""

    def run_and_die():
        die_at(moment, calls)
        run()

    child = multiprocessing.get_context("fork").Process(target=run_and_die)
    child.start()
    child.join()
    return child.exitcode


def count_deaths(run, rng, fewest=5, most=45, calls=("replace", "link")):
    """Call ``run()`` in processes that die after a random written file, until one ends well.

    Args:
        run: Goes on where the last process was killed.
        rng: Draws the number of the file, from ``fewest`` to ``most``. Results are linked.

    Returns:
        How many processes were killed.
    """
    deaths = 0
    while (code := run_until(run, 2 * rng.randint(fewest, most), calls)) == -signal.SIGKILL:
        deaths += 1
    assert code == 0
    return deaths
