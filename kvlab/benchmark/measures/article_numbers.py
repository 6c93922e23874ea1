"""The articles' numbers, each with the exact one beside it and the reason for the difference."""

from collections.abc import Iterator

from kvlab.benchmark.measurement import Measurement, TableLayout
from kvlab.benchmark.session import Session
from kvlab.layout.article_claims import article_claims

TABLES: tuple[TableLayout, ...] = ()


def measure(session: Session) -> Iterator[Measurement]:
    """Yield one line per claim. They are computed and do not depend on machine or variants."""
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
