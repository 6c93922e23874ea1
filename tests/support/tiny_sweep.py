"""A real sweep that takes seconds: a tiny model on a few files of text."""

import io
import random
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from kvlab.cli.commands import submit
from kvlab.cli.main import main

WORDS = [
    "the", "cache", "keeps", "keys", "and", "values", "for", "every", "token", "that", "came",
    "before", "it",
]  # fmt: skip

EXPERIMENT = """\
name: tiny
model: {vocab_size: 257, block_size: 16, n_layer: 2, n_head: 2, n_embd: 8}
data: {source: files, tokenizer: bytes, paths: [texts], validation_fraction: 0.2}
training: {tokens: 640, batch_tokens: 64, evaluate_every: 5, evaluate_tokens: 64}
evaluation: {loss_tokens: 64}
benchmark: {prompt_tokens: 4, new_tokens: 4, repeats: 1, retime: never}
"""

ENDLESS_EXPERIMENT = EXPERIMENT.replace("tokens: 640,", "tokens: 64e9,")
"""Trains until it is stopped."""

SWEEP = """\
question: What does it cost?
experiment: e.yaml
factors:
  heads:
    mha: {}
    mqa: {model.n_kv_head: 1}
"""

LEVELS = "".join(f"    t{tokens}: {{training.tokens: {tokens}}}\n" for tokens in (640, 1280, 960))
BUDGETS = f"question: q\nexperiment: e.yaml\nfactors:\n  budget:\n{LEVELS}"
RECIPE = "training: {checkpoint_every: 3, schedule: wsd, warmup_tokens: 64, decay_tokens: 192, "
TRUNK_EXPERIMENT = EXPERIMENT.replace("training: {", RECIPE)
"""With `BUDGETS`: three trainings that share a stable phase."""

SHORT_REPORT = "report: {sections: [answer, cells, failures]}\n"
"""To add to a sweep whose report is looked at without its figures: they take seconds."""

FAILING_SWEEP = (
    SWEEP
    + "    greedy: {benchmark.batch_sizes: [1e15]}\nfailures: {out_of_memory: fail}\n"
    + SHORT_REPORT
)
"""One level of three fails, because no memory holds its batch. It shares a training."""

OUTER_VARIABLES = ("KVLAB_STORE", "MLFLOW_TRACKING_URI", "KVLAB_COPY_TO", "KVLAB_NOTIFY")


def write_tiny_sweep(folder: Path, sweep: str = SWEEP, experiment: str = EXPERIMENT) -> Path:
    """Write text, experiment and sweep into ``folder``; return the path of the sweep."""
    random_words = random.Random(0)
    (folder / "texts").mkdir()
    for number in range(40):
        text = " ".join(random_words.choices(WORDS, k=100))
        (folder / "texts" / f"{number:02}.txt").write_text(f"{text}\n")
    (folder / "e.yaml").write_text(experiment)
    (folder / "s.yaml").write_text(sweep)
    return folder / "s.yaml"


@contextmanager
def tiny_sweep_folder(
    folder: Path, sweep: str = SWEEP, experiment: str = EXPERIMENT, *, publishes: bool = False
) -> Iterator[Path]:
    """Work in ``folder`` with a sweep in it, without settings from the environment.

    Args:
        publishes: Mirror submitted sweeps into MLflow, which takes seconds, and wherever they ask.
    """
    write_tiny_sweep(folder, sweep, experiment)
    with pytest.MonkeyPatch.context() as patch:
        if not publishes:
            patch.setattr(submit, "find_publishers", dict)
        patch.chdir(folder)
        patch.setenv("KVLAB_DATA", str(folder / "data"))
        for name in OUTER_VARIABLES:
            patch.delenv(name, raising=False)
        yield folder


def run_kvlab(*arguments: object) -> tuple[int, str, str]:
    """Run a command in this process; return exit code, standard output and standard error."""
    output, error = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(error):
        code = main([*map(str, arguments)])
    return code, output.getvalue(), error.getvalue()
