"""The speed of the code here over that of an earlier commit: the same work, in one run.

    python -m tests.performance.earlier_commit COMMIT [ROUND_COUNT]

Each commit has a process of its own, and they work in turn, never at once. As the memory that a
process happens to get decides a few percent, there are `STARTS` pairs of processes. The ratio is
that of the median processor times of a round, and its range that of the pairs. Beside it is the
ratio of the least times of all rounds, which other load on the machine raises least.
Above 1 the code here is slower. The work is written in names that both commits must have.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
STARTS, ROUNDS = 5, 5

WORK = """
import sys, time
from types import SimpleNamespace
import numpy as np
import torch
from kvlab.data.batches import spread_windows
from kvlab.evaluate.validation_loss import target_losses
from kvlab.model import GPT
from kvlab.model.generate import make_decoder, prefill
from kvlab.model.kernels.malloc import keep_freed_memory
from kvlab.spec import ServingConfig, load_experiment
from kvlab.train.train_step import TrainStepper

torch.set_num_threads(1)
keep_freed_memory()  # as trials do
experiment = load_experiment("experiments/quickstart.yaml")
text = np.random.default_rng(0).integers(0, experiment.model.vocab_size, 2**18).astype(np.uint16)
dataset = SimpleNamespace(train=text, validation=text)

def change(changes):  # a copy would keep what the model has computed of its layers
    return type(experiment.model)(**{**experiment.model.model_dump(), **changes})

def training(changes):
    model = change(changes)
    stepper = TrainStepper(GPT(model, seed=0), dataset, experiment.model_copy(update={"model": model}), 0)
    stepper.connect_workers()
    numbers = iter(range(10**6))
    def work():
        for _ in range(4):
            stepper.step(next(numbers))
    return work

def decoding(serving, changes={}):
    model = GPT(change(changes), seed=0).eval()
    length = model.config.block_size
    prompt = torch.from_numpy(text[:length // 2].astype(np.int64))[None]
    def work():
        with torch.inference_mode():
            cache = model.new_cache(1, length, serving)
            prefill(model, prompt, cache)
            step = make_decoder(model, cache)
            for token in range(length // 2):
                step(torch.tensor([token]))
    return work

def scoring(serving):
    model = GPT(experiment.model, seed=0).eval()
    windows = spread_windows(text, 16 * model.config.block_size, model.config.block_size)
    return lambda: target_losses(model, windows, serving)

hybrid = {"attention_pattern": "GL", "window": 32}
works = {
    "training": training({}),
    "training, windows": training(hybrid),
    "training, one K/V head": training({"n_kv_head": 1}),
    "prefill and decode": decoding(ServingConfig()),
    "prefill and decode, windows": decoding(ServingConfig(), hybrid),
    "prefill and decode, int8": decoding(ServingConfig(kv_dtype="int8")),
    "one-shot loss": scoring(None),
    "served loss": scoring(ServingConfig()),
}
print(len(works), flush=True)
for name, work in works.items():
    work()
    print(name, flush=True)
    while sys.stdin.readline().strip():
        start = time.process_time()
        work()
        print(time.process_time() - start, flush=True)
"""


def run(commit: str, rounds: int = ROUNDS) -> Iterator[str]:
    """Yield the rows of a table."""
    times: dict[str, list[list[list[float]]]] = {}
    with _checked_out(commit) as earlier:
        for _ in range(STARTS):
            for name, sides in _time_pair(earlier, rounds):
                times.setdefault(name, []).append(sides)
    yield f"processor time of a round, one thread; medians of {STARTS} times {rounds} rounds"
    yield f"{'work':30}  {commit[:12]:>12}      here  ratio  of the pairs  of the least"
    for name, starts in times.items():
        pairs = [[median(side) for side in sides] for sides in starts]
        before, here = (median(side) for side in zip(*pairs, strict=True))
        ratios = sorted(new / old for old, new in pairs)
        least = [min(min(sides[index]) for sides in starts) for index in range(2)]
        yield (
            f"{name:30}  {before * 1e3:9.1f} ms  {here * 1e3:5.1f} ms  {median(ratios):5.2f}"
            f"  {ratios[0]:.2f} to {ratios[-1]:.2f}  {least[1] / least[0]:12.2f}"
        )


def _time_pair(earlier: Path, rounds: int) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield the name of each work, and the seconds of the earlier code and of that here."""
    with ExitStack() as stack:
        sides = [stack.enter_context(_worker(tree)) for tree in (earlier, ROOT)]
        count = {int(_read(side)) for side in sides}.pop()
        for _ in range(count):
            name = {_read(side) for side in sides}.pop()
            seconds = [[_work(side) for side in sides] for _ in range(rounds)]
            for side in sides:
                _write(side, "")
            yield name, [list(side) for side in zip(*seconds, strict=True)]


@contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    """Yield the files of a commit, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


@contextmanager
def _worker(tree: Path) -> Iterator["subprocess.Popen[str]"]:
    """Yield a process that has the code of ``tree`` and does the work when told to."""
    command = [sys.executable, "-c", WORK]  # which looks for modules in its folder first
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tree, env={**os.environ, "PYTHONPATH": ""}, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _work(side: "subprocess.Popen[str]") -> float:
    _write(side, "go")
    return float(_read(side))


def _write(side: "subprocess.Popen[str]", line: str) -> None:
    side.stdin.write(f"{line}\n")
    side.stdin.flush()


def _read(side: "subprocess.Popen[str]") -> str:
    line = side.stdout.readline()
    if not line:
        raise RuntimeError(f"{side.args[0]} ended: the commit has other names than the work uses")
    return line.strip()


if __name__ == "__main__":
    for row in run(sys.argv[1], *map(int, sys.argv[2:])):
        print(row, flush=True)
