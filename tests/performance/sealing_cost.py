"""What the checks of hashes cost: reading and reporting a record, and training on checked tokens.

Both sides run in turn in this process. The figures are ratios of CPU time, of the least that each
side took: other processes can only add to it.
"""

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from kvlab.analysis.study import Study
from kvlab.data import get_training_batch
from kvlab.data.shards import BLOCK_BYTES, CheckedTokens
from kvlab.fs import sealed_files
from kvlab.model import GPT
from kvlab.report import write_report
from kvlab.spec import Experiment, load_experiment
from kvlab.store import store as store_module
from kvlab.train.train_step import TrainStepper
from tests.performance.report_speed import SIZES, big_record
from tests.performance.timing import LimitMissed

QUICKSTART = Path(__file__).parents[2] / "experiments" / "quickstart.yaml"
MOST_RECORD, MOST_TRAINING = 1.3, 1.02
TRIALS, ITEMS = 1_000, 200
"""Trials, and items of HellaSwag in each, which lie in a file of their own."""

READ_ROUNDS, REPORT_ROUNDS, BATCH_ROUNDS, STEPS = 12, 2, 3, 8
TEXT_TOKENS = 2**24
"""64 times what the quickstart trains on: its windows lie all over, so that all is hashed."""


def run() -> Iterator[str]:
    """Reading 1,000 trials, reporting them, and training, with checks against without.

    Raises:
        LimitMissed: A ratio is above its limit.
    """
    missed = []
    for name, ratio, limit in (*_compare_records(), _compare_trainings()):
        yield f"{name}: {ratio:.3f} times the CPU time without checks (at most {limit})"
        if ratio > limit:
            missed.append(name)
    if missed:
        raise LimitMissed(f"{' and '.join(missed)}: above {MOST_RECORD} or {MOST_TRAINING}")


def _compare_records() -> Iterator[tuple[str, float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        record = replace(big_record(SIZES[TRIALS]), items=ITEMS)
        store = record.write(Path(folder) / "store")

        def read() -> None:
            Study.load(store, "made")

        def report() -> None:
            write_report(store, "made", Path(folder))

        for name, work, rounds in (("read", read, READ_ROUNDS), ("report", report, REPORT_ROUNDS)):
            checked, plain = [], []
            for _ in range(rounds):
                checked.append(_cpu_seconds(work))
                with _without_checks():
                    plain.append(_cpu_seconds(work))
            yield f"to {name} {TRIALS:,} trials", min(checked) / min(plain), MOST_RECORD


def _cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


@contextmanager
def _without_checks() -> Iterator[None]:
    """Read sealed files without a look at their hashes during the block."""

    def read_bytes(path: Path) -> bytes:
        return Path(path).read_bytes()

    with ExitStack() as stack:
        for module in (sealed_files, store_module):
            stack.enter_context(mock.patch.object(module, "read_sealed_bytes", read_bytes))
            stack.enter_context(mock.patch.object(module, "check_file", return_value=None))
        yield


def _compare_trainings() -> tuple[str, float, float]:
    """The quickstart's training, as its batches from either kind of tokens and its other work."""
    experiment, threads = load_experiment(QUICKSTART), torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.bin"
        np.random.default_rng(0).integers(0, 256, TEXT_TOKENS, np.uint16).tofile(path)
        hashes, dtype = _hash_blocks(path), np.dtype(np.uint16)
        checked, plain = [], []
        for _ in range(BATCH_ROUNDS):
            tokens = CheckedTokens(path, dtype, hashes)
            checked.append(_cpu_seconds(lambda read=tokens: _read_batches(experiment, read)))
            mapped = np.memmap(path, dtype, mode="r")
            plain.append(_cpu_seconds(lambda read=mapped: _read_batches(experiment, read)))
        training = _training_seconds(experiment, np.memmap(path, dtype, mode="r"))
    torch.set_num_threads(threads)
    more = min(checked) - min(plain)
    name = f"the quickstart's training on a text of {TEXT_TOKENS * 2 >> 20} MiB"
    return name, 1 + more / training, MOST_TRAINING


def _read_batches(experiment: Experiment, tokens: npt.NDArray[np.unsignedinteger]) -> None:
    training, block = experiment.training, experiment.model.block_size
    rows = training.batch_tokens // block
    for step in range(training.steps):
        get_training_batch(tokens, seed=0, step=step, batch_size=rows, block_size=block)


def _training_seconds(experiment: Experiment, tokens: npt.NDArray[np.unsignedinteger]) -> float:
    """Return the CPU time of all steps, from the median of a few."""
    text = SimpleNamespace(train=tokens, validation=tokens[:10_000])
    step = TrainStepper(GPT(experiment.model, seed=0), text, experiment, 0).step
    step(0)
    seconds = [_cpu_seconds(lambda n=number: step(n)) for number in range(1, STEPS)]
    return experiment.training.steps * median(seconds)


def _hash_blocks(path: Path) -> bytes:
    data = path.read_bytes()
    starts = range(0, len(data), BLOCK_BYTES)
    return b"".join(hashlib.sha256(data[i : i + BLOCK_BYTES]).digest() for i in starts)
