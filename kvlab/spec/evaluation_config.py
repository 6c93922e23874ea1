"""`evaluation` of an experiment: which qualities are measured, and on how much."""

from typing import Literal

from pydantic import Field

from kvlab.spec.spec_model import NonNegativeInt, PositiveInt, SpecModel


class EvaluationConfig(SpecModel):
    """`evaluation`: quality. Every number once one-shot, and once through the cache if served."""

    loss_tokens: PositiveInt = Field(
        default=65_536, description="Validation tokens of the final loss."
    )
    hellaswag: Literal["all", "none"] | NonNegativeInt = Field(
        default="none", description="all, none, or the first N items."
    )
    served: bool = Field(default=True, description="Measure again through the serving cache.")
    served_tokens: PositiveInt | None = Field(
        default=None,
        description="Validation tokens scored through the cache, token by token; default"
        " loss_tokens.",
    )
    recall: NonNegativeInt = Field(
        default=0, description="Rows of the associative recall probe; 0 for none."
    )
    positions: bool = Field(
        default=False, description="Measure the loss by position; over served_tokens if served."
    )

    @property
    def hellaswag_items(self) -> int | None:
        """The number of items to score: None for all, 0 for none."""
        if isinstance(self.hellaswag, int):
            return self.hellaswag
        return None if self.hellaswag == "all" else 0
