"""Associative recall, which the average loss hides. Synthetic; nothing is downloaded.

A row is P pairs of a key and a value, then the keys again in another order, each with its value:

    k1 v1 k2 v2 ... kP vP | k7 v7 k2 v2 ...

At each repeated key the model should predict the value that followed it, up to a whole context
earlier. This is the multi-query associative recall of Zoology (arXiv 2312.04927), put to a
language model. It selects among the row's P values, so chance is 1/P. Keys and values are random
tokens, so that knowledge of language does not help.

Shapes: R rows, P pairs, E n_embd.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvlab.evaluate.forward_passes import OnCount, iter_states_at
from kvlab.model import GPT
from kvlab.spec import ServingConfig

_STREAM = 0x7265636C  # separates these draws from other uses of a row's number

Array = npt.NDArray[np.int64]


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
        philox = np.random.Philox(key=[_STREAM, number])
        # sorting raw words gives a permutation that no version of numpy changes
        words = np.argsort(philox.random_raw(vocabulary), kind="stable")[: 2 * pairs]
        order = np.argsort(philox.random_raw(pairs), kind="stable")
        shown = np.stack([words[:pairs], words[pairs:]], 1)
        rows.append((np.concatenate([shown, shown[order]]).ravel(), words[pairs:], order))
    return RecallRows(*(np.stack(part) for part in zip(*rows, strict=True)))


@torch.inference_mode()
def score_recall(
    model: GPT, rows: RecallRows, serving: ServingConfig | None, on_progress: OnCount
) -> npt.NDArray[np.bool_]:
    """Return (R, P), whether each answer was correct.

    Args:
        serving: feed each token alone through this cache. None: one-shot.
        on_progress: called with the number of tokens that are newly read.
    """
    found = []
    for part, states in iter_states_at(model, rows.tokens, rows.positions, serving, on_progress):
        values, answers = (
            torch.from_numpy(array[part]).to(model.device) for array in (rows.values, rows.answers)
        )
        logits = states @ model.lm_head.weight[values].transpose(1, 2)  # of the row's values only
        found.append((logits.argmax(-1) == answers).cpu().numpy())
    return np.concatenate(found)


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
