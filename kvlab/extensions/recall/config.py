"""`data.recall` of an experiment: how many pairs, how many questions, and how far back."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from kvlab.spec.source_options import SourceEntry, SourceOptions
from kvlab.spec.spec_model import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problems,
    SpecModel,
    TupleOf,
)

NOISE_SYMBOLS = 16

Form = Literal["fused", "separate"]


class SymbolRanges(NamedTuple):
    """Ids of the symbols by their part in a document.

    Attributes:
        pairs: Of the fused form, ``key * values + value``; of the separate form empty.
        values: Values beside their key, in the separate form; of the fused form empty.
        answers: A symbol for each pair, or in the separate form for each value.
    """

    pairs: range
    keys: range
    values: range
    answers: range
    noise: range


def _number_to_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, int | float) and not isinstance(value, bool) else value


Counts = Annotated[
    TupleOf[PositiveInt],
    Field(min_length=1),
    BeforeValidator(_number_to_tuple, json_schema_input_type=int | tuple[int, ...]),
]


class RecallConfig(SourceOptions):
    """`data.recall`: documents of pairs, and questions about them, for source: recall.

    A document shows pairs of a key and a value, then asks for the values of some keys. Only
    answers are targets, and have symbols of their own. Of several values of one key the last one is
    the answer.
    """

    form: Form = "fused"
    """fused: a pair is one token, and its answer names the pair. separate: key and value are two,
    as in MQAR (arXiv 2312.04927), and the answer names the value; small models learn it late.
    Example: separate, gap: 63"""
    keys: PositiveInt = 16
    """Different keys. Unit: keys. Example: 12, pairs: 12, questions: 12, gap: 27"""
    values: Annotated[PositiveInt, Field(ge=2)] = 16
    """Different values; chance is one in these. Unit: values. Example: 8"""
    pairs: Counts = (16,)
    """Pairs of a document, or several numbers, of which each is that of equally many documents.
    Unit: pairs. Example: [4, 8, 16], questions: 4, gap: 7"""
    questions: PositiveInt = 16
    """Questions of a document, each about another key. Unit: questions. Example: 8, gap: 31"""
    rewrites: NonNegativeInt = 0
    """Pairs of a document whose key occurs in another pair, too.
    Unit: pairs. Example: 4, questions: 8, gap: 31"""
    gap: NonNegativeInt = 15
    """Tokens without meaning between the pairs and the questions. Unit: tokens. Example: 79"""
    power: PositiveFloat | None = None
    """A question is about a pair at distance d with a probability proportional to d^(power - 1), so
    that small exponents ask what is near; without it each key is equally likely.
    Unit: none. Default: none. Example: 0.01"""
    documents: Annotated[PositiveInt, Field(le=10**8)] = 40_000
    """Documents of the text, training and held-out. Unit: documents. Example: 100000"""
    seed: Annotated[NonNegativeInt, Field(lt=2**32)] = 0
    """Of the text; a training's seed only orders it. Example: 1"""

    @property
    def ranges(self) -> SymbolRanges:
        """The ids of each kind of symbol."""
        is_fused = self.form == "fused"
        sizes = (
            self.keys * self.values * is_fused, self.keys, self.values * (not is_fused),
            self.values * (self.keys if is_fused else 1), NOISE_SYMBOLS,
        )  # fmt: skip
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        return SymbolRanges(*map(range, [0, *ends[:-1]], ends))

    @property
    def symbols(self) -> int:
        return self.ranges.noise.stop

    @property
    def target_ids(self) -> range:
        return self.ranges.answers

    @property
    def pair_tokens(self) -> int:
        """Tokens of one pair."""
        return 1 if self.form == "fused" else 2

    @property
    def document_tokens(self) -> int:
        return 1 + self.pair_tokens * max(self.pairs) + self.gap + 2 * self.questions

    def _find_problems(self) -> Problems:
        if list(self.pairs) != sorted(set(self.pairs)):
            yield "pairs", f"does not increase; use {sorted(set(self.pairs))}"
        fewest, most = min(self.pairs), max(self.pairs)
        if 2 * self.rewrites > fewest:
            text = f"leaves too few of {fewest} pairs whose key is new"
            yield "rewrites", f"{text}; use {fewest // 2} or less"
            return
        if most - self.rewrites > self.keys:
            text = f"are fewer than the {most - self.rewrites} that a document has"
            yield "keys", f"{text}; use {most - self.rewrites} or more"
        if self.questions > fewest - self.rewrites:
            text = "are more than the keys of a document with the fewest pairs"
            yield "questions", f"{text}; use {fewest - self.rewrites} or less"


class RecallFields(SpecModel):
    """What `data` gets."""

    omitted_defaults = frozenset({"recall"})

    recall: RecallConfig | None = None
    """How many pairs, how many questions and how far back, for source: recall.
    Default: none. Example: {pairs: 8, questions: 8, gap: 7}, source: recall,
    tokenizer: 'symbols:544'"""


def find_config(data: SpecModel) -> RecallConfig:
    """Return the options of ``source: recall``."""
    config = RecallFields.of(data).recall
    assert config is not None, "the spec asks for it"
    return config


SOURCE = SourceEntry("kvlab.extensions.recall.source:Recall", options="recall")
