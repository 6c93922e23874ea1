"""The speed of the code here over that of an earlier commit: the same work, in one run.

    python -m tests.performance.earlier_commit COMMIT [START_COUNT]

Processes of the two commits take turns, as the memory that one happens to get decides a few percent.
Each gives its least processor time of a round, which other load on the machine raises least. The
ratio is that of the medians, and its range that of the pairs. Above 1 the code here is slower. The
work is written in names that both commits must have.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
STARTS, ROUNDS = 5, 5

WORK = """
import json, os, tempfile, time
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import torch
from kvlab.data.batches import spread_windows
from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.data.tokenizers import load_tokenizer
from kvlab.evaluate.hellaswag import score_hellaswag
from kvlab.evaluate.validation_loss import target_losses
from kvlab.model import GPT
from kvlab.model.generate import make_decoder, prefill
from kvlab.model.kernels.malloc import keep_freed_memory
from kvlab.report import write_report
from kvlab.spec import DataConfig, ServingConfig, load_experiment
from kvlab.train.train_step import TrainStepper
from tests.support.hellaswag_items import ITEMS
from tests.support.record_factory import Record

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

def scoring_endings():
    model = GPT(experiment.model, seed=0).eval()
    words = load_tokenizer(experiment.data.tokenizer)
    return lambda: score_hellaswag(model, ITEMS, words, ServingConfig())

def tokenizing(folder):
    path = Path(folder) / "text.jsonl"
    lines = (json.dumps({"text": f"{n} " + Path(json.__file__).read_text()}) for n in range(300))
    path.write_text(chr(10).join(lines))
    numbers = iter(range(100))
    def work():
        os.environ["KVLAB_DATA"] = f"{folder}/{next(numbers)}"
        prepare_dataset(DataConfig(source="files", paths=(str(path),)), workers=1)
    return work

def reporting(folder):
    factors = {name: tuple(f"{name}{n}" for n in range(10)) for name in "ab"}
    store = Record(factors=factors).write(Path(folder) / "runs")
    return lambda: write_report(store, "made", Path(folder), ["answer", "effects", "cells", "curves"])

own = tempfile.TemporaryDirectory()
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
    "HellaSwag": scoring_endings(),
    "tokenization": tokenizing(own.name),
    "report": reporting(own.name),
}
seconds = {}
for name, work in works.items():
    for number in range(ROUNDS + 1):  # the first one warms up
        start = time.process_time()
        work()
        if number:
            seconds.setdefault(name, []).append(time.process_time() - start)
print(json.dumps({name: min(times) for name, times in seconds.items()}))
"""


def run(commit: str, starts: int = STARTS) -> Iterator[str]:
    """Yield the rows of a table."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        pairs = [[_time_works(tree) for tree in (Path(folder), ROOT)] for _ in range(starts)]
    yield f"least processor time of {ROUNDS} rounds, one thread; medians of {starts} processes"
    yield f"{'work':30}  {commit[:12]:>12}      here  ratio  of the pairs"
    for name in pairs[0][0]:
        times = [[one[name] for one in pair] for pair in pairs]
        before, here = (median(side) for side in zip(*times, strict=True))
        ratios = sorted(new / old for old, new in times)
        yield (
            f"{name:30}  {before * 1e3:9.1f} ms  {here * 1e3:5.1f} ms  {here / before:5.2f}"
            f"  {ratios[0]:.2f} to {ratios[-1]:.2f}"
        )


def _time_works(tree: Path) -> dict[str, float]:
    """Return the seconds of each work, in a process that has the code of ``tree``."""
    command = [
        sys.executable,
        "-c",
        f"ROUNDS = {ROUNDS}\n{WORK}",
    ]  # its folder's modules come first
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE)
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


if __name__ == "__main__":
    for row in run(sys.argv[1], *map(int, sys.argv[2:])):
        print(row, flush=True)
