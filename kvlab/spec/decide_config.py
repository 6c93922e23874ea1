"""`decide`: what a sweep is to decide, written down before its first result.

decide: {margin: 0.02, claims: [heads=mqa, position=rope]}
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvlab.humanize import suggest_name
from kvlab.spec.spec_model import Problems, SpecModel, TupleOf

Names = Annotated[TupleOf[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class DecideConfig(SpecModel):
    """`decide`: the claims that are tested together, and the difference that does not matter.

    None of it changes what a trial computes.
    """

    # The table of metrics stands above this package: commands that read a sweep check the name.

    margin: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """A cost below it does not matter, in the metric's unit, such as 0.02 nats/token. Enables the
    verdict: costs less than the margin.
    Unit: of decide.metric. Example: 0.02"""
    metric: str | None = None
    """The metric that is decided; `kvlab metrics` lists them.
    Default: loss_served, if measured. Example: bits_per_byte_served"""
    claims: Names | None = None
    """Claims that are tested, as [heads=mqa, ...].
    Default: every level but the baseline's and the sizes of `size`. Example: [heads=mqa]"""
    alpha: Annotated[float, Field(ge=0.001, le=0.2)] = 0.05
    """Probability of any wrong claim, over all claims together. Unit: probability. Example: 0.01"""
    over: dict[str, Names] | None = None
    """Levels of other factors that the effect of a level is the mean over, as {factor: [level,
    ...]}.
    Default: all that are served as they were trained. Example: {sharing: [none, tied]}"""
    reference: Names | None = None
    """Factors whose levels a cell has in common with the cell that it is compared with, beside
    those that save no bytes.
    Default: `size` and `match`. Example: [position]"""


def list_claims(
    decide: DecideConfig,
    factors: Mapping[str, Any],
    baseline: Mapping[str, str],
    size_factor: str | None = None,
) -> tuple[str, ...]:
    """Return the claims as ``factor=level``; without a list, every level but the baseline's.

    Args:
        size_factor: The factor of `size`, of which nothing is claimed by default: that larger
            models are better is no question, and would cost the others power.
    """
    if decide.claims is not None:
        return decide.claims
    return tuple(
        f"{factor}={level}"
        for factor, levels in factors.items()
        for level in levels
        if level != baseline[factor] and factor != size_factor
    )


def find_claim_problems(
    decide: DecideConfig, factors: Mapping[str, Any], baseline: Mapping[str, str]
) -> Problems:
    """Yield what names no level: of claims, of `over` and of `reference`.

    A claim is no baseline level either, and is named once.
    """
    names = [f"{factor}={level}" for factor, levels in factors.items() for level in levels]
    claims = decide.claims or ()
    for number, claim in enumerate(claims):
        key, (factor, _, level) = f"decide.claims.{number}", claim.partition("=")
        if claim not in names:
            yield key, f"is not a level, written as factor=level; {suggest_name(claim, names)}"
        elif baseline.get(factor) == level:
            yield key, f"is the baseline level of {factor}, which nothing is claimed of; remove it"
        elif claim in claims[:number]:
            yield key, "is named twice; name each claim once"
    over, named = decide.over or {}, enumerate(decide.reference or ())
    keys = {f"over.{factor}": factor for factor in over} | {f"reference.{n}": f for n, f in named}
    for key, factor in keys.items():
        if factor not in factors:
            yield f"decide.{key}", f"is not a factor; {suggest_name(factor, factors)}"
    for factor, levels in over.items():
        own = factors.get(factor, levels)
        for number, level in enumerate(levels):
            if level not in own:
                text = f"is not a level of {factor}; {suggest_name(level, own)}"
                yield f"decide.over.{factor}.{number}", text
