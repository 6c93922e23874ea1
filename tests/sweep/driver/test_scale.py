"""Plan thousands of trials in seconds, and drive hundreds in constant memory."""

import gc
import time

import psutil
import pytest

from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.sweep import Driver, plan
from kvlab.sweep.executors.inline import InlineExecutor
from tests.support.stub_trials import StubRun, identify, write_many

PLAN_SECONDS = 3.0
"""Limit of processor time. It is loose, since cores that processes share count double;
`python -m tests.performance driver` has the tight one."""

GROWTH_BYTES = 3.2e6
"""Limit of the driver's growth over 400 trials, whose results take 6.4 MB as Python objects."""


def test_thousands_of_trials_are_planned_in_seconds(tmp_path):
    began = time.process_time()
    planned = plan(
        load_sweep(write_many(tmp_path, 3_000)), Store(tmp_path / "runs"), identify=identify
    )
    assert time.process_time() - began < PLAN_SECONDS
    assert len({one.trial.id for one in planned.trials}) == 3_000


@pytest.mark.faults
def test_the_drivers_memory_does_not_grow_with_finished_trials(tmp_path):
    store, process, memory = Store(tmp_path / "runs"), psutil.Process(), []
    planned = plan(load_sweep(write_many(tmp_path, 500)), store, identify=identify)

    def look(_):
        if len(memory) in (99, 499):
            gc.collect()
        memory.append(process.memory_info().rss)

    run = StubRun(store.path, name=planned.sweep.name)
    summary = Driver(planned, store, InlineExecutor(run), on_result=look).run()
    assert summary.states["done"] == 500
    assert memory[499] - memory[99] < GROWTH_BYTES, f"{memory[99]:,} to {memory[499]:,}"
