"""Two probes of what the average loss hides. Nothing is downloaded.

**Associative recall**, synthetic.
A row is P pairs of a key and a value, then the keys again in another order, each with its value:

    k1 v1 k2 v2 ... kP vP | k7 v7 k2 v2 ...

At each repeated key the model should predict the value that followed it, up to a whole context
earlier. This is the multi-query associative recall of Zoology (arXiv 2312.04927), put to a
language model. It selects among the row's P values, so chance is 1/P. Keys and values are random
tokens, so that knowledge of language does not help.

**A needle in a haystack**: what is still found of a text, by its length and the needle's depth.

A row is real validation text. At one place a key of random tokens and an answer of random tokens
stand in place of the text's own (the needle), and the row ends with the key again:

    text ... k1 k2 k3 k4 a1 a2 a3 a4 ... text ... k1 k2 k3 k4 | a1 a2 a3 a4

Scored are the loss of the answer and the share of its tokens that are the likeliest. The same row
is also scored without a needle, with the text's own tokens in its place: no token outside it moves,
so where a window or a cache does not reach back to the needle, both losses are equal. The probe is
Kamradt's needle in a haystack (github.com/gkamradt/LLMTest_NeedleInAHaystack) in the form of
RULER's keys and values (arXiv 2404.06654), with random tokens, so that small models need no
instruction and knowledge of language does not help.

Shapes: R rows, P pairs, E n_embd, D depths, T tokens of a row, A answer tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlab.data.batches import Tokens
from kvlab.evaluate.evaluation import Evaluation, StartPart, list_scorings
from kvlab.evaluate.forward_passes import SILENT, Arrays, Part, compute_at
from kvlab.evaluate.validation_loss import Floats
from kvlab.extensions.probes.config import NEEDLE_ANSWER_TOKENS, NEEDLE_KEY_TOKENS, ProbeFields
from kvlab.model import GPT
from kvlab.model.loss import token_scores
from kvlab.spec import ServingConfig
from kvlab.spec.experiment import Experiment

Array = npt.NDArray[np.int64]

_RECALL_STREAM = 0x7265636C  # separates these draws from other uses of a row's number


def measure_probes(
    model: GPT, validation: Tokens, experiment: Experiment, start_part: StartPart
) -> Evaluation:
    """Measure the probes of an experiment, see `kvlab.evaluate.evaluation.measure_extensions`."""
    asked = ProbeFields.of(experiment.evaluation)
    vocabulary = experiment.data.vocabulary.size - 1  # without the end of text of kvlab's own
    scorings, found = list_scorings(experiment), Evaluation({})
    if asked.recall:
        rows = make_recall_rows(asked.recall, model.config.block_size, vocabulary)
        part = start_part("associative recall", rows.tokens.size * len(scorings))
        found.measurements.update({"recall_rows": asked.recall, "recall_pairs": rows.pairs})
        for suffix, serving in scorings.items():
            is_correct = score_recall(model, rows, serving, part)
            found.measurements.update(recall_measurements(rows, is_correct, suffix))
    if asked.needle is not None:
        depths, count = asked.needle.depths, asked.needle.rows
        total = sum(asked.needle.lengths) * (len(depths) + 1) * count * len(scorings)
        part, lines = start_part("needle in a haystack", total), list[dict[str, Any]]()
        for length in asked.needle.lengths:
            needles = make_needle_rows(validation, length, depths, count, vocabulary)
            scores = [score_needles(model, needles, one, part) for one in scorings.values()]
            lines += needle_lines(needles, *scores)
        found.measurements.update(needle_measurements(lines))
        found.lines["needle"] = lines
    return found


@dataclass(frozen=True)
class RecallRows:
    """R rows of P pairs.

    Attributes:
        tokens: (R, 4 P).
        values: (R, P), the answers to select from.
        answers: (R, P), for each repeated key the index of its value in ``values``.
    """

    tokens: Array
    values: Array
    answers: Array

    @property
    def pairs(self) -> int:
        return int(self.values.shape[1])

    @property
    def positions(self) -> Array:
        """Positions (P,) of the repeated keys, where the answers are predicted."""
        return np.arange(2 * self.pairs, 4 * self.pairs, 2)

    @property
    def distances(self) -> Array:
        """Tokens (R, P) from a repeated key back to the value that answers it."""
        return self.positions - (2 * self.answers + 1)


def make_recall_rows(count: int, block_size: int, vocabulary: int) -> RecallRows:
    """Make ``count`` rows that fill ``block_size`` tokens, the same ones on every machine.

    Args:
        vocabulary: ids below it may be drawn: the tokenizer's words without its end of text.
    """
    pairs = max(1, min(block_size // 4, vocabulary // 2))
    rows = []
    for number in range(count):
        philox = np.random.Philox(key=[_RECALL_STREAM, number])
        # sorting raw words gives a permutation that no version of numpy changes
        words = np.argsort(philox.random_raw(vocabulary), kind="stable")[: 2 * pairs]
        order = np.argsort(philox.random_raw(pairs), kind="stable")
        shown = np.stack([words[:pairs], words[pairs:]], 1)
        rows.append((np.concatenate([shown, shown[order]]).ravel(), words[pairs:], order))
    return RecallRows(*(np.stack(part) for part in zip(*rows, strict=True)))


@torch.inference_mode()
def score_recall(
    model: GPT, rows: RecallRows, serving: ServingConfig | None, part: Part = SILENT
) -> npt.NDArray[np.bool_]:
    """Return (R, P), whether each answer was correct.

    Args:
        serving: feed each token alone through this cache. None: one-shot.
        part: advanced by the tokens that are newly read.
    """

    def compute(some: slice, states: Tensor) -> Arrays:
        values, answers = (
            torch.from_numpy(array[some]).to(model.device) for array in (rows.values, rows.answers)
        )
        logits = states @ model.lm_head.weight[values].transpose(1, 2)  # of the row's values only
        return {"is_correct": (logits.argmax(-1) == answers).cpu().numpy()}

    done = compute_at(model, rows.tokens, rows.positions, serving, part, compute)
    return done["is_correct"]


def recall_measurements(
    rows: RecallRows, is_correct: npt.NDArray[np.bool_], suffix: str
) -> dict[str, float | int]:
    """Return shares of correct answers by the names of `kvlab.store.metrics`.

    They are over all answers, over those at most a quarter of the row back (``near``), and over
    those more than half of the row back (``far``).
    """
    length, distances = rows.tokens.shape[1], rows.distances
    shares: dict[str, float | int] = {f"recall_acc{suffix}": float(is_correct.mean())}
    for name, mask in (("near", distances <= length // 4), ("far", distances > length // 2)):
        if mask.any():
            shares[f"recall_acc_{name}{suffix}"] = float(is_correct[mask].mean())
    return shares


# A needle in a haystack


_NEEDLE_STREAM = 0x6E65656C  # separates these draws from other uses of a row's number


@dataclass(frozen=True)
class NeedleRows:
    """R rows of one length, at each depth and without a needle.

    Attributes:
        depths: shares of the text before the needle, D of them.
        tokens: (D + 1, R, T); the last of the first axis has no needle.
        answers: (R, A), predicted at the last A positions of a row.
        chance: nats per answer token of guessing by how often tokens occur in the text.
    """

    depths: tuple[float, ...]
    tokens: Array
    answers: Array
    chance: float

    @property
    def length(self) -> int:
        return int(self.tokens.shape[2])


class NeedleScores(NamedTuple):
    """Scores by depth and row, without a needle at the last depth.

    Attributes:
        losses: nats per answer token, (D + 1, R).
        accuracies: shares of answer tokens that are the likeliest token, (D + 1, R).
    """

    losses: Floats
    accuracies: Floats


def make_needle_rows(
    text: Tokens, length: int, depths: Sequence[float], count: int, vocabulary: int
) -> NeedleRows:
    """Make ``count`` rows of ``length`` tokens, the same ones on every machine.

    Args:
        text: validation token ids, at least ``length``; rows are spread evenly over it.
        vocabulary: ids below it may be drawn: the tokenizer's words without its end of text.
    """
    body = length - (NEEDLE_KEY_TOKENS + NEEDLE_ANSWER_TOKENS - 1)
    starts = np.linspace(0, len(text) - body, count).astype(np.int64)
    frequencies = np.bincount(text[:], minlength=vocabulary)[:vocabulary]
    rows, answers = [], []
    for number, start in enumerate(starts.tolist()):
        haystack = text[start : start + body].astype(np.int64)
        key, answer = np.split(_draw_needle(number, haystack, frequencies), [NEEDLE_KEY_TOKENS])
        question = np.concatenate([haystack, key, answer[:-1]])  # the last token is never fed
        row = np.repeat(question[None], len(depths) + 1, 0)
        needle = np.concatenate([key, answer])
        for index, depth in enumerate(depths):
            place = round(depth * (len(haystack) - len(needle)))
            row[index, place : place + len(needle)] = needle
        rows.append(row)
        answers.append(answer)
    shares = (frequencies + 1) / (frequencies + 1).sum()
    chance = -float(np.log(shares[np.stack(answers)]).mean())
    return NeedleRows(tuple(depths), np.stack(rows, 1), np.stack(answers), chance)


def _draw_needle(number: int, haystack: Array, frequencies: Array) -> Array:
    """Draw the tokens of a key and an answer: by frequency, each once, none of the haystack's.

    Token i of weight w is drawn by its exponential clock -log(u) / w (Efraimidis and Spirakis
    2006).
    """
    weights = frequencies.astype(np.float64)
    weights[haystack[haystack < len(weights)]] = 0.0
    count = NEEDLE_KEY_TOKENS + NEEDLE_ANSWER_TOKENS
    if np.count_nonzero(weights) < count:  # a text of few words: then any word
        weights = (frequencies + 1).astype(np.float64)
    philox = np.random.Philox(key=[_NEEDLE_STREAM, number])
    uniform = (philox.random_raw(len(weights)) >> np.uint64(11)) * 2.0**-53
    with np.errstate(divide="ignore"):
        clocks = -np.log1p(-uniform) / weights
    return np.argsort(clocks, kind="stable")[:count]


@torch.inference_mode()
def score_needles(
    model: GPT, rows: NeedleRows, serving: ServingConfig | None, part: Part = SILENT
) -> NeedleScores:
    """Score the answers.

    Args:
        serving: feed each token alone through this cache. None: one-shot.
        part: advanced by the tokens that are newly read.
    """
    shape, size = rows.tokens.shape[:2], rows.answers.shape[1]
    tokens = rows.tokens.reshape(-1, rows.length)
    targets = torch.from_numpy(np.tile(rows.answers, (shape[0], 1))).to(model.device)
    positions = np.arange(rows.length - size, rows.length)

    def compute(some: slice, states: Tensor) -> Arrays:
        scores = token_scores(states, model.lm_head.weight, targets[some])
        losses, hits = (score.double().mean(1).cpu().numpy() for score in scores)
        return {"losses": losses, "accuracies": hits}

    done = compute_at(model, tokens, positions, serving, part, compute)
    return NeedleScores(done["losses"].reshape(shape), done["accuracies"].reshape(shape))


def needle_lines(
    rows: NeedleRows, one_shot: NeedleScores, served: NeedleScores | None = None
) -> list[dict[str, Any]]:
    """Return what is recorded of one length: a line a depth.

    Every number is a mean over rows, with its standard error over rows under ``*_stderr``: the
    ``loss`` of the answer in nats per token, the ``loss_absent`` of the same rows without a needle,
    the ``gain`` of the needle (their paired difference) and the ``accuracy``; each again with the
    suffix ``_served``, and the paired ``loss_change`` of serving.
    """
    lines = []
    for index, depth in enumerate(rows.depths):
        values: dict[str, Floats] = {}
        for suffix, scores in (("", one_shot), ("_served", served)):
            if scores is not None:
                loss, absent = scores.losses[index], scores.losses[-1]
                values[f"loss{suffix}"], values[f"loss_absent{suffix}"] = loss, absent
                values[f"gain{suffix}"] = absent - loss
                values[f"accuracy{suffix}"] = scores.accuracies[index]
        if served is not None:
            values["loss_change"] = served.losses[index] - one_shot.losses[index]
        line: dict[str, Any] = {"length": rows.length, "depth": depth, "rows": len(rows.answers)}
        for name, by_row in values.items():
            line[name] = float(by_row.mean())
            line[f"{name}_stderr"] = float(by_row.std(ddof=1) / len(by_row) ** 0.5)
        lines.append({**line, "chance": rows.chance})
    return lines


def needle_measurements(lines: Sequence[dict[str, Any]]) -> dict[str, float | int]:
    """Return means over all lengths and depths by the names of `kvlab.store.metrics`."""
    names = [f"{name}{suffix}" for suffix in ("", "_served") for name in
             ("loss", "loss_absent", "accuracy")]  # fmt: skip
    means = {
        f"needle_{name}": sum(line[name] for line in lines) / len(lines)
        for name in [*names, "chance"]
        if name in lines[0]
    }
    return {"needle_rows": lines[0]["rows"], **means}
