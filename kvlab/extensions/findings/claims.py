"""`reports/claims.yaml`: what articles claim, and which part of which record answers it.

articles:
- article: The KV Cache
  claims:
  - claim: Multi-query attention maintains accuracy.
    answers:
    - {record: quickstart, effect: heads=mqa, holds: bounded}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from kvlab.spec.spec_loader import validate_data
from kvlab.spec.spec_model import Name, Problems, SpecModel, TextRule, TupleOf, normalize_level_name
from kvlab.spec.yaml_reader import YamlDocument, read_yaml

Text = Annotated[str, Field(min_length=1)]
Address = Annotated[str, TextRule(r"https?://[^\s()|]+", "is no address; write https://...")]
CellLevels = dict[Name, Annotated[Name, BeforeValidator(normalize_level_name)]]

KINDS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "effect": (frozenset({"record"}), frozenset({"metric", "holds"})),
    "trend": (frozenset({"record"}), frozenset()),
    "quantity": (frozenset({"record"}), frozenset({"cell", "smaller_than", "says"})),
    "cell": (frozenset({"record", "holds"}), frozenset()),
    "formula": (frozenset(), frozenset()),
}
"""Kind of an answer, which is its main key -> other keys that it needs, and that it may have."""


class Answer(SpecModel):
    """What answers a claim: an effect, a trend, a cell or a quantity of a record, or a formula."""

    record: Name | None = None
    """Name of a report that has a record."""
    effect: Text | None = None
    """A level, as factor=level, or with the setting that a report names it by."""
    trend: Text | None = None
    """A level whose effect may change with size, as factor=level."""
    cell: CellLevels | None = None
    """The levels of a cell that are not the baseline's."""
    quantity: Text | None = None
    """A metric of the cell, or of the baseline without one."""
    formula: Text | None = None
    """Name of a number of `kvlab.extensions.findings.articles`."""
    metric: Text | None = None
    """Metric of the effect, if it is not the one that is decided."""
    smaller_than: CellLevels | None = None
    """The levels of another cell: how many times smaller the quantity is."""
    says: float | None = None
    """The article's figure, in the metric's unit or as a ratio."""
    holds: Literal["bounded", "better"] | None = None
    """What must be shown for the claim to hold: that the cost is below the sweep's margin, or that
    there is a gain."""

    @property
    def kind(self) -> str:
        """What answers: the first of `KINDS` that is given; empty if none is."""
        return next((kind for kind in KINDS if kind in self.model_fields_set), "")

    def _find_problems(self) -> Problems:
        if not self.kind:
            yield "", f"names nothing that answers; add one of {', '.join(KINDS)}"
            return
        needed, optional = KINDS[self.kind]
        given = self.model_fields_set - {self.kind}
        for key in sorted(given - needed - optional):
            yield key, f"does not go with {self.kind}; remove one of them"
        for key in sorted(needed - given):
            yield "", f"lacks {key}; add it"
        if self.kind == "effect" and len(given & {"metric", "holds"}) != 1:
            rule = "needs either holds, or the metric of an effect that is only explored"
            yield "effect", f"{rule}; write one of them"


class Claim(SpecModel):
    """One claim of an article."""

    claim: Text
    """The claim in a sentence, with the article's own figures."""
    answers: TupleOf[Answer] = ()
    """Without any, it is not run."""
    note: Annotated[str, TextRule(r"\D+", "has a figure; figures come from records")] | None = None
    """What else is to be said, without any figure."""


class Article(SpecModel):
    """An article and its claims."""

    article: Text
    """Its title."""
    address: Address | None = None
    """Its address."""
    claims: Annotated[TupleOf[Claim], Field(min_length=1)]


class Claims(SpecModel):
    """The file."""

    articles: Annotated[TupleOf[Article], Field(min_length=1)]


def load_claims(path: str | Path) -> tuple[Claims, YamlDocument]:
    """Read the file, and the places of its keys."""
    document = read_yaml(path)
    return validate_data(Claims, document.data, document), document
