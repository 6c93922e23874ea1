"""HellaSwag in lm-eval's own convention: lm-eval with `transformers`, lm-eval with kvlab's model,
and kvlab's own evaluation, on the same weights and items in one run. Compares predictions too."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvlab.data.hellaswag_dataset import HellaSwagItem, load_hellaswag
from kvlab.data.tokenizers import load_tokenizer
from kvlab.errors import DataError
from kvlab.evaluate.hellaswag import score_hellaswag
from kvlab.model import GPT
from kvlab.model.kernels.malloc import keep_freed_memory
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.trial.model_targets import OpenedModel
from tests.performance.decode_speed import transformers_model
from tests.performance.timing import LimitMissed, least_in_turn
from tests.support.hellaswag_items import ITEMS

if TYPE_CHECKING:
    from tests.extensions.lm_eval.reference import Predictions

COUNT, ROUNDS = 96, 2
BATCHES = (4, 16)
"""Rows a pass of lm-eval's own model; the fastest counts. It pads to the longest of a batch."""

LEAST_RATIO = 3.0
OURS = "kvlab's evaluation"


def run() -> Iterator[str]:
    """Compare predictions and seconds.

    Raises:
        LimitMissed: predictions differ, or kvlab is less than `LEAST_RATIO` times as fast.
    """
    from lm_eval.models.huggingface import HFLM

    from kvlab.extensions.lm_eval.harness import harness_model
    from tests.extensions.lm_eval import reference as lm_eval_reference

    try:
        items = [*load_hellaswag()[:: -(-10_042 // COUNT)], *ITEMS]
    except DataError as error:
        yield f"skipped: {error}"
        return
    model = _enlarge_weights(GPT(ModelConfig(preset="gpt2"), seed=0))
    words = lm_eval_reference.gpt2_words()
    theirs = transformers_model(model)
    with tempfile.TemporaryDirectory() as folder:
        task = lm_eval_reference.hellaswag_task(Path(folder) / "items.jsonl", items)

        def run_lm_eval(lm: Any) -> Predictions:
            return [lm_eval_reference.prediction(s) for s in lm_eval_reference.samples(lm, task)]

        ways: dict[str, Callable[[], Predictions]] = {}
        for rows in BATCHES:
            # lm-eval's model and loop with nothing set but the batch size
            lm = HFLM(pretrained=theirs, tokenizer=words, batch_size=rows)
            ways[f"lm-eval, transformers, batches of {rows}"] = partial(run_lm_eval, lm)
        adapted = harness_model(OpenedModel("made", model.eval(), ServingConfig(), "gpt2"))
        ways["lm-eval, kvlab's model"] = partial(run_lm_eval, adapted)
        ways[OURS] = lambda: _by_kvlab(model, items)
        found: dict[str, Predictions] = {}
        works = {name: partial(lambda n, w: found.update({n: w()}), name, way)
                 for name, way in ways.items()}  # fmt: skip
        seconds = least_in_turn(works, ROUNDS)
    yield f"{len(items)} items, GPT-2 124M, float32, {torch.get_num_threads()} threads;"
    yield f"processor seconds of the best of {ROUNDS} rounds in turn"
    reference = min((name for name in ways if "transformers" in name), key=seconds.__getitem__)
    missed = []
    for name in ways:
        same = sum(a == b for a, b in zip(found[name], found[reference], strict=True))
        yield (
            f"{name:36}  {seconds[name]:6.1f} s  {seconds[reference] / seconds[name]:5.2f} times"
            f" as fast; {same} of {len(items)} predictions equal"
        )
        if same < len(items):
            missed.append(f"{name} predicts {len(items) - same} items otherwise")
    ratio = seconds[reference] / seconds[OURS]
    if ratio < LEAST_RATIO:
        missed.append(f"{ratio:.2f} times as fast is below {LEAST_RATIO}")
    if missed:
        raise LimitMissed("; ".join(missed))


def _enlarge_weights(model: GPT) -> GPT:
    """Enlarge random weights, so that endings differ by nats and not by rounding."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def _by_kvlab(model: GPT, items: list[HellaSwagItem]) -> "Predictions":
    with keep_freed_memory():  # as `kvlab.evaluate.evaluate` does
        records = score_hellaswag(model, items, load_tokenizer("gpt2"), conventions=("lmeval",))
    return [
        (found["prediction"], found["prediction_norm"])
        for found in (record["lmeval"]["one_shot"] for record in records)
    ]
