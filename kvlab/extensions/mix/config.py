"""`data.mix` of an experiment: the sources of one text, and the share of each."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from kvlab.own_extensions import explain_missing
from kvlab.spec.source_options import SourceEntry
from kvlab.spec.spec_model import SpecModel, join_or, raise_problems

_ROUNDING = 1e-6  # of shares such as 0.3333333

SOURCE = SourceEntry(
    "kvlab.extensions.mix.dataset:join_datasets",
    options="mix",
    divide="kvlab.extensions.mix.division:divide",
)


class Shares(dict[str, float]):
    """Shares of tokens by source; it is not changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def _check_shares(shares: dict[str, float]) -> Shares:
    from kvlab.spec.data_config import SOURCES  # its table has the entry above

    names = [name for name, entry in SOURCES.items() if entry.divide is None]
    problems = [
        (
            name,
            explain_missing(f"data.mix.{name}") or f"is no source of a mix; use {join_or(names)}",
        )
        for name in shares
        if name not in names
    ]
    if not problems and len(shares) < 2:
        problems.append(("", "is not several sources; name two or more, or use data.source"))
    if not problems and all(SOURCES[name].options for name in shares):
        problems.append(("", "has no source of text; add one, such as docstrings"))
    if not problems and abs(sum(shares.values()) - 1) > _ROUNDING:
        problems.append(("", f"has shares that sum to {sum(shares.values()):.9g}; make it 1"))
    raise_problems(problems)
    return Shares(shares)


class MixFields(SpecModel):
    """What `data` gets."""

    omitted_defaults = frozenset({"mix"})

    mix: (
        Annotated[dict[str, Annotated[float, Field(gt=0, lt=1)]], AfterValidator(_check_shares)]
        | None
    ) = None
    """Share of the tokens of each source, for source: mix, which it stands for where no source is
    written. data.tokenizer is that of text; symbols follow its ids.
    Default: none. Example: {docstrings: 0.7, recall: 0.3},
    tokenizer: bytes, recall: {pairs: 8, questions: 8, gap: 7}"""

    @model_validator(mode="before")
    @classmethod
    def _name_source(cls, data: Any) -> Any:
        is_mix = isinstance(data, dict) and data.get("mix") is not None
        return {"source": "mix", **data} if is_mix else data
