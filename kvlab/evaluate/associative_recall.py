"""Associative recall: what average loss hides. Synthetic, nothing to download.

A row is P pairs of a key and a value, then the keys again in another order, each with its value:

    k1 v1 k2 v2 ... kP vP | k7 v7 k2 v2 ...

At each repeated key the model should say the value that followed it, up to a whole context
earlier: the multi-query associative recall of Zoology (arXiv 2312.04927), asked of a language
model. It answers among the row's P values, so chance is 1/P. Keys and values are tokens drawn at
random, so what is known of language helps nobody.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlab.evaluate.forward_passes import OnTokens, decode_rows, pass_rows, served_hidden_states
from kvlab.model import GPT
from kvlab.spec import ServingConfig

_STREAM = 0x7265636C  # keeps these draws apart from other uses of a row's number

Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RecallRows:
    """R rows of P pairs.

    Attributes:
        tokens: (R, 4 P).
        values: (R, P), the answers to choose from.
        answers: (R, P), for each repeated key the index of its value in ``values``.
    """

    tokens: Array
    values: Array
    answers: Array

    @property
    def pairs(self) -> int:
        return int(self.values.shape[1])

    @property
    def places(self) -> Array:
        """(P,) where the repeated keys stand: there the answer is predicted."""
        return np.arange(2 * self.pairs, 4 * self.pairs, 2)

    @property
    def distances(self) -> Array:
        """(R, P) tokens from a repeated key back to the value that answers it."""
        return self.places - (2 * self.answers + 1)


def make_recall_rows(count: int, block_size: int, vocabulary: int) -> RecallRows:
    """``count`` rows that fill ``block_size`` tokens, the same on every machine.

    Args:
        vocabulary: ids below it may be drawn; the tokenizer's words without its end of text.
    """
    pairs = max(1, min(block_size // 4, vocabulary // 2))
    drawn = [_draw_row(number, pairs, vocabulary) for number in range(count)]
    tokens, values, answers = (np.stack(part) for part in zip(*drawn, strict=True))
    return RecallRows(tokens, values, answers)


def _draw_row(number: int, pairs: int, vocabulary: int) -> tuple[Array, Array, Array]:
    philox = np.random.Philox(key=[_STREAM, number])
    # sorting raw words is a permutation that no version of numpy changes
    words = np.argsort(philox.random_raw(vocabulary), kind="stable")[: 2 * pairs]
    order = np.argsort(philox.random_raw(pairs), kind="stable")
    keys, values = words[:pairs], words[pairs:]
    first = np.stack([keys, values], 1).ravel()
    again = np.stack([keys[order], values[order]], 1).ravel()
    return np.concatenate([first, again]), values, order


@torch.inference_mode()
def score_recall(
    model: GPT, rows: RecallRows, serving: ServingConfig | None, tick: OnTokens
) -> npt.NDArray[np.bool_]:
    """(R, P), whether each answer was the right one.

    Args:
        serving: token by token through this cache; None: one-shot.
        tick: called with the number of tokens just read.
    """
    length = rows.tokens.shape[1]
    size = pass_rows(model, length) if serving is None else decode_rows(model, length, serving)

    def hidden(x: Tensor) -> Tensor:
        return (
            model.hidden_states(x)
            if serving is None
            else served_hidden_states(model, x, serving, tick)
        )

    return np.concatenate(list(_correct_answers(model, rows, size, hidden, tick)))


def _correct_answers(
    model: GPT, rows: RecallRows, size: int, hidden: Callable[[Tensor], Tensor], tick: OnTokens
) -> Iterator[npt.NDArray[np.bool_]]:
    places = torch.from_numpy(rows.places).to(model.device)
    for start in range(0, len(rows.tokens), size):
        part = slice(start, start + size)
        tokens, values, answers = (
            torch.from_numpy(array[part]).to(model.device)
            for array in (rows.tokens, rows.values, rows.answers)
        )
        found = hidden(tokens)[:, places]  # (R, P, E)
        logits = found @ model.lm_head.weight[values].transpose(1, 2)  # of the row's values alone
        tick(tokens.numel())
        yield (logits.argmax(-1) == answers).cpu().numpy()


def recall_measurements(
    rows: RecallRows, right: npt.NDArray[np.bool_], ending: str
) -> dict[str, float | int]:
    """Shares by the names of `kvlab.store.metrics`: of all, of those at most a quarter of the
    row back, and of those more than half a row back."""
    length, distances = rows.tokens.shape[1], rows.distances
    found: dict[str, float | int] = {f"recall_acc{ending}": float(right.mean())}
    for name, chosen in (("near", distances <= length // 4), ("far", distances > length // 2)):
        if chosen.any():
            found[f"recall_acc_{name}{ending}"] = float(right[chosen].mean())
    return found
