"""The timing lock of a shared device: those that work, and one that times, by real locks."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from kvlab.trial.gpu_timing_lock import TimingLock


@pytest.fixture
def locks(tmp_path):
    """Two that share a device. A lock belongs to what opened its file, not to a process."""
    made = [TimingLock("GPU-1", tmp_path) for _ in range(2)]
    for lock in made:
        lock.share()
    yield made
    for lock in made:
        lock.close()


@pytest.mark.parametrize("give_way", [TimingLock.yield_to_timing, TimingLock.share])
def test_one_times_alone_while_the_other_waits_at_its_next_step(locks, give_way):
    """Or where it comes back from an error."""
    works, times = locks
    assert not works.yield_to_timing(), "nobody wants to time"
    waits, is_alone, steps_wait, is_over = (Event() for _ in range(4))

    def measure():
        with times.exclusive(waits.set, 60.0) as is_held:
            assert is_held
            is_alone.set()
            assert is_over.wait(60)

    with ThreadPoolExecutor(2) as threads:
        timing = threads.submit(measure)
        assert waits.wait(60)
        assert not is_alone.is_set(), "the other is within a step"
        step = threads.submit(give_way, works, steps_wait.set)
        assert is_alone.wait(60)
        assert steps_wait.wait(60)
        assert not step.done()
        is_over.set()
        timing.result(60)
        assert step.result(60) in (True, None)
    assert not works.yield_to_timing()


def test_patience_ends_and_says_so(tmp_path, locks):
    waits = []
    with locks[0].exclusive(lambda: waits.append(1), timeout=0.1) as is_alone:
        assert not is_alone
    assert waits
    assert not locks[1].yield_to_timing(), "nothing is held after it"
    with TimingLock("GPU-2", tmp_path).exclusive() as is_alone:
        assert is_alone, "another device is another matter"
