"""`failures` of a sweep: what happens when a trial does not end as it should."""

from typing import Annotated, Literal

from pydantic import Field

from kvlab.spec.base import CountOrZero, SpecModel

Seconds = Annotated[float, Field(ge=0.0, le=86_400.0)]


class FailuresConfig(SpecModel):
    """Policies by class of failure. None of it changes what a trial computes.

    A loss that diverges is a result, and bad data or an impossible request is recorded at once:
    neither gets better when it is tried again.
    """

    killed_retries: CountOrZero = Field(
        default=3, description="Starts again after its process died, in a row without progress."
    )
    backoff_seconds: Seconds = Field(
        default=1.0, description="Wait before the first of those; doubled each time, up to 5 min."
    )
    out_of_memory: Literal["shrink", "fail"] = Field(
        default="shrink",
        description="Of the device or of the host. shrink: again with a smaller microbatch (same"
        " mathematics), then alone on its GPU.",
    )
    same_error: CountOrZero = Field(
        default=3, description="Stop when this many trials fail at the same place; 0 never."
    )
