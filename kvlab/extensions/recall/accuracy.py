"""How often a model gives the right answer, by number of pairs and by distance.

Shapes: D documents, L tokens of a document with the end of text before it, Q answers of each.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvlab.data.batches import Batch, ScoredText, Tokens, find_targets
from kvlab.evaluate.evaluation import (
    Evaluation,
    Measurements,
    StartPart,
    list_scorings,
    select_scored_text,
)
from kvlab.evaluate.forward_passes import Arrays, Part, batch_rows, hidden_states, join_arrays
from kvlab.extensions.recall.config import RecallConfig, find_config
from kvlab.model import GPT
from kvlab.model.loss import token_scores
from kvlab.spec import ServingConfig
from kvlab.spec.experiment import Experiment

Array = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Questions(NamedTuple):
    """What each answer of some documents needs, in the order of the tokens.

    Attributes:
        pairs: Pairs of its document, (questions,).
        distances: Tokens from its key back to the value that answers it, (questions,).
    """

    pairs: Array
    distances: Array


def find_questions(config: RecallConfig, documents: Array) -> Questions:
    """Return what the answers of documents (D, L) need, from their tokens alone."""
    ranges, count = config.ranges, len(documents)
    shown = ranges.pairs if config.form == "fused" else ranges.values
    is_pair = find_targets(documents, [shown])
    last = np.zeros((count, config.keys), np.int64)  # where the last value of each key stands
    for position in range(documents.shape[1]):
        rows = np.flatnonzero(is_pair[:, position])
        if config.form == "fused":
            keys = (documents[rows, position] - shown.start) // config.values
        else:
            keys = documents[rows, position - 1] - ranges.keys.start
        last[rows, keys] = position
    row, places = np.nonzero(find_targets(documents, [config.target_ids]))
    asked = documents[row, places - 1] - ranges.keys.start
    return Questions(is_pair.sum(1)[row], places - 1 - last[row, asked])


def measure_recall(
    model: GPT, validation: Tokens, experiment: Experiment, start_part: StartPart
) -> Evaluation:
    """Measure the share of answers that are the likeliest token, one-shot and served.

    Both are of the documents that are scored served, or if none are, of those of the loss.
    Without documents of the source `recall` nothing is measured.
    """
    parts = {part.data.source: (n, part) for n, part in enumerate(experiment.data.parts)}
    if "recall" not in parts:
        return Evaluation({})
    (number, own), config = parts["recall"], find_config(experiment.data)
    text, served = select_scored_text(validation, experiment)
    text, scorings = text if served is None else served, list_scorings(experiment)
    text = text.select(np.flatnonzero(text.window_parts == number))
    if not len(text):
        return Evaluation({})
    part = start_part("recall", text.token_count * len(scorings))
    tokens = np.concatenate([inputs for inputs, _ in text.iter_batches(len(text))]) - own.first_id
    questions = find_questions(config, tokens.reshape(-1, config.document_tokens))
    groups = group_questions(questions)
    measurements: Measurements = {"recall_chance": 1 / config.values}
    for suffix, serving in scorings.items():
        is_right = score_answers(model, text, serving, part)
        for name, members in groups.items():
            measurements[f"{name}{suffix}"] = float(is_right[members].mean())
    measurements |= {f"{name}_items": int(own.sum()) for name, own in groups.items()}
    return Evaluation(measurements)


def group_questions(questions: Questions) -> dict[str, Bools]:
    """Return which questions each metric is over: all, those of documents of a number of pairs, and
    those whose value is at most a power of two back and more than half of it."""
    groups = {"recall": np.ones(len(questions.pairs), np.bool_)}
    for pairs in np.unique(questions.pairs).tolist():
        groups[f"recall_{pairs}_pairs"] = questions.pairs == pairs
    ends = 2 ** np.ceil(np.log2(questions.distances)).astype(np.int64)
    for end in np.unique(ends).tolist():
        groups[f"recall_{end}_back"] = ends == end
    return groups


@torch.inference_mode()
def score_answers(model: GPT, text: ScoredText, serving: ServingConfig | None, part: Part) -> Bools:
    """Return whether each target of a text is the likeliest token, (targets,).

    Args:
        serving: feed each token alone through this cache. None: one-shot.
        part: advanced by the tokens that are newly read.
    """
    ids = text.target_ids
    assert ids is not None, "only answers are targets"

    def compute(batch: Batch) -> Arrays:
        inputs, targets = (torch.from_numpy(tokens).to(model.device) for tokens in batch)
        is_target = find_targets(targets, ids)
        states = hidden_states(model, inputs, serving, part, text.document_start)[is_target]
        part.advance(inputs.numel())
        hits = token_scores(states, model.lm_head.weight, targets[is_target])[1]
        return {"hits": hits.cpu().numpy()}

    batches = text.iter_batches(batch_rows(model, text.block_size, serving))
    return join_arrays(part.keep(compute, batches))["hits"]
