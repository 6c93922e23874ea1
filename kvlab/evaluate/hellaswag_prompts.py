"""HellaSwag items as text and tokens, in the two conventions that are in use.

``completion``: the context is ``ctx``, as in the GPT-2 reproductions; ``acc_norm`` divides the
log-likelihood of an ending by its tokens. ``lmeval``: EleutherAI's harness; the context is the
activity label and the context in capitalised sentences, brackets are stripped, and
``acc_norm`` divides by the characters of the ending. Their numbers differ by points.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from kvlab.data import HellaSwagItem, Tokenizer


@dataclass(frozen=True)
class Prompt:
    """An item in one convention: a context, and endings that follow it after a space.

    ``in_context``: an ending's tokens are what the whole text has beyond the context, and
    whitespace at the end of the context belongs to the ending; otherwise both are encoded apart.
    """

    context: str
    endings: tuple[str, ...]
    in_context: bool


def completion_prompt(item: HellaSwagItem) -> Prompt:
    return Prompt(item.ctx, item.endings, in_context=False)


def lmeval_prompt(item: HellaSwagItem) -> Prompt:
    context = f"{item.activity_label}: {item.ctx_a} {item.ctx_b.capitalize()}"
    endings = tuple(_strip_markup(ending) for ending in item.endings)
    return Prompt(_strip_markup(context), endings, in_context=True)


def _strip_markup(text: str) -> str:
    """Without the marks that the WikiHow half of the set carries, as the harness has it."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


CONVENTIONS: dict[str, Callable[[HellaSwagItem], Prompt]] = {
    "completion": completion_prompt,
    "lmeval": lmeval_prompt,
}


@dataclass(frozen=True)
class Continuations:
    """A context that is scored once, and the endings that continue it; ids, never empty."""

    context: list[int]
    endings: list[list[int]]


@dataclass(frozen=True)
class Question:
    """One item in one convention, ready to be scored.

    Attributes:
        branches: one, or one an ending where the context had to be shortened differently.
        characters, tokens: of each ending; what its score may be divided by.
        is_shortened: the context lost its beginning to fit the model.
    """

    branches: list[Continuations]
    characters: list[int]
    tokens: list[int]
    is_shortened: bool


def make_question(wording: Prompt, tokenizer: Tokenizer, block_size: int) -> Question:
    """Tokens of context and endings; what does not fit is cut from the left of the context."""
    context, endings = _encode_prompt(wording, tokenizer)
    pairs = [_fit_context(context, ending, block_size) for ending in endings]
    shortened = any(kept != context for kept, _ in pairs)
    branches = (
        [Continuations(kept, [ending]) for kept, ending in pairs]
        if shortened
        else [Continuations(context, endings)]
    )
    characters = [len(ending) for ending in wording.endings]
    return Question(branches, characters, [len(ending) for ending in endings], shortened)


def _encode_prompt(wording: Prompt, tokenizer: Tokenizer) -> tuple[list[int], list[list[int]]]:
    if wording.in_context:
        context = tokenizer.encode(wording.context.rstrip())
        whole = [f"{wording.context} {ending}" for ending in wording.endings]
        endings = [ids[len(context) :] for ids in tokenizer.encode_batch(whole)]
    else:
        context = tokenizer.encode(wording.context)
        endings = tokenizer.encode_batch([f" {ending}" for ending in wording.endings])
    return context or [tokenizer.end_of_text], endings


def _fit_context(
    context: list[int], ending: list[int], block_size: int
) -> tuple[list[int], list[int]]:
    """The last ``block_size + 1`` tokens of both: the last one is predicted, never fed."""
    kept = (context + ending)[-(block_size + 1) :]
    scored = min(len(ending), len(kept) - 1)
    return kept[:-scored], kept[-scored:]
