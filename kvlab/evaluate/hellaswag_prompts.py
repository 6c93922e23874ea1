"""HellaSwag items as text and tokens, in the two conventions in use.

- ``completion``: the context is ``ctx``, as in the GPT-2 reproductions. ``acc_norm`` divides the
  log-likelihood of an ending by its tokens.
- ``lmeval``: EleutherAI's harness. The context is the activity label and the context in
  capitalized sentences, and text in brackets is stripped. ``acc_norm`` divides by the characters
  of the ending.

Their results differ by percentage points.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvlab.data import HellaSwagItem, Tokenizer
from kvlab.evaluate.continuations import Continuations, fit_to_block


@dataclass(frozen=True)
class Prompt:
    """An item in one convention: a context, and endings that follow it after a space.

    Attributes:
        encodes_whole: an ending's tokens are those of the whole text beyond the context's, and
            whitespace at the end of the context belongs to the ending. Otherwise context and
            ending are encoded separately.
    """

    context: str
    endings: tuple[str, ...]
    encodes_whole: bool


def completion_prompt(item: HellaSwagItem) -> Prompt:
    return Prompt(item.ctx, item.endings, encodes_whole=False)


def lmeval_prompt(item: HellaSwagItem) -> Prompt:
    context = f"{item.activity_label}: {item.ctx_a} {item.ctx_b.capitalize()}"
    endings = tuple(_strip_markup(ending) for ending in item.endings)
    return Prompt(_strip_markup(context), endings, encodes_whole=True)


def _strip_markup(text: str) -> str:
    """Remove the markup of the WikiHow items, as lm-eval does."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


@dataclass(frozen=True)
class Convention:
    """How items are put to the model and their scores normalized.

    Attributes:
        make_prompt: turns an item into text.
        divisor: by what the score of an ending is divided for ``prediction_norm``.
        metric_prefix: of the metrics' names.
    """

    make_prompt: Callable[[HellaSwagItem], Prompt]
    divisor: Literal["tokens", "characters"]
    metric_prefix: str


CONVENTIONS = {
    "completion": Convention(completion_prompt, "tokens", "hellaswag"),
    "lmeval": Convention(lmeval_prompt, "characters", "hellaswag_lmeval"),
}


@dataclass(frozen=True)
class Question:
    """One item in one convention, as token ids.

    Attributes:
        groups: one, or one per ending if the context was shortened.
        divisors: tokens or characters of each ending.
        is_shortened: the context lost its beginning to fit the model.
    """

    groups: list[Continuations]
    divisors: list[int]
    is_shortened: bool


def make_question(
    item: HellaSwagItem, convention: Convention, tokenizer: Tokenizer, block_size: int
) -> Question:
    """Encode an item. What does not fit is cut from the left of the context."""
    prompt = convention.make_prompt(item)
    context, endings = _encode_prompt(prompt, tokenizer)
    fitted = [fit_to_block(context, ending, block_size) for ending in endings]
    is_shortened = any(fitted_context != context for fitted_context, _ in fitted)
    groups = [Continuations(context, endings)]
    if is_shortened:
        groups = [Continuations(shortened, [ending]) for shortened, ending in fitted]
    divisors = map(len, endings if convention.divisor == "tokens" else prompt.endings)
    return Question(groups, list(divisors), is_shortened)


def _encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> tuple[list[int], list[list[int]]]:
    if prompt.encodes_whole:
        context = tokenizer.encode(prompt.context.rstrip())
        whole = [f"{prompt.context} {ending}" for ending in prompt.endings]
        endings = [ids[len(context) :] for ids in tokenizer.encode_batch(whole)]
    else:
        context = tokenizer.encode(prompt.context)
        endings = tokenizer.encode_batch([f" {ending}" for ending in prompt.endings])
    return context or [tokenizer.end_of_text], endings
