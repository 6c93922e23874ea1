"""`data.source: fineweb-edu-*` and `data.subset` of an experiment."""

from typing import TYPE_CHECKING, Annotated, cast

from kvlab.spec.source_options import SourceEntry
from kvlab.spec.spec_model import Problems, SpecModel, TextRule

if TYPE_CHECKING:
    from kvlab.spec.data_config import DataConfig

PART_10B, PART_100B, PART_350B, PART_CRAWL = (
    SourceEntry("kvlab.extensions.fineweb_edu.source:FineWebEdu", (sample,))
    for sample in ("10BT", "100BT", "350BT", None)
)

_CRAWL = TextRule(r"^CC-MAIN-[0-9]{4}-[0-9]{2}$", "is not a crawl; use one such as CC-MAIN-2024-10")


class FineWebEduFields(SpecModel):
    """What `data` gets."""

    excluded_from_identity = frozenset({"subset"})

    subset: Annotated[str, _CRAWL] | None = None
    """The crawl, for source: fineweb-edu-crawl.
    Example: CC-MAIN-2024-10, source: fineweb-edu-crawl"""

    def _find_problems(self) -> Problems:
        data = cast("DataConfig", self)
        named = {data.source, *(part.data.source for part in data.parts)}
        if "fineweb-edu-crawl" not in named and self.subset is not None:
            text = f"is read only by source: fineweb-edu-crawl, not {data.source}; remove one"
            yield "subset", text
        elif "fineweb-edu-crawl" in named and self.subset is None:
            yield "source", "needs data.subset; name a crawl, such as CC-MAIN-2024-10"
        yield from super()._find_problems()
