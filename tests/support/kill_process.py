"""Running something in a process that dies by SIGKILL between two files that it writes."""

import itertools
import multiprocessing
import os
import signal


def deaths_until_done(run, rng, fewest=5, most=45):
    """Runs ``run()`` again and again, each time in a process that is killed at a file whose
    number ``rng`` draws, until one comes to its end.

    Returns:
        How often it died.
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
    """Runs in this process, which dies at its so many-th written file."""
    count = itertools.count(1)

    def deadly(place):
        def place_and_die(*paths):
            place(*paths)
            if next(count) == writes:
                os.kill(os.getpid(), signal.SIGKILL)

        return place_and_die

    os.replace, os.link = deadly(os.replace), deadly(os.link)  # results are linked
    run()
