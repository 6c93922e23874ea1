"""The articles' numbers, each with the right one beside it and the reason in a sentence."""

from collections.abc import Iterator

from kvlab.benchmark.measurement import Measurement
from kvlab.benchmark.session import Session
from kvlab.layout.article_claims import article_claims


def measure(session: Session) -> Iterator[Measurement]:
    """Arithmetic alone: the same on every machine, whatever the variants are."""
    del session
    for claim in article_claims():
        yield Measurement(
            part="articles",
            metric=f"exact_{claim.unit.lower()}",
            variant=claim.name,
            value=claim.exact,
            unit=claim.unit,
            exact=True,
            against=f"the article's {claim.printed}",
            note=claim.why,
        )
