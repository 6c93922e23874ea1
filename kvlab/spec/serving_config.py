"""`serving` of an experiment: what changes only inference."""

from typing import Annotated, Literal

from pydantic import Field

from kvlab.spec.dtypes import list_kv_dtypes
from kvlab.spec.model_config import SharingField
from kvlab.spec.spec_model import OneOf, SpecModel


class ServingConfig(SpecModel):
    """`serving`: what changes only inference. It never retrains.

    ``tie`` joins layers on one cache slot though each was trained with its own K/V. With
    ``tie_rule: overwrite`` every layer writes the shared slot and the last one wins, as in the
    code of the Character.AI article; with ``owner`` only the first layer of a group writes.
    """

    kv_dtype: Annotated[str, OneOf(list_kv_dtypes)] = Field(
        default="model", description="How K/V are stored; model keeps the model's dtype."
    )
    tie: SharingField = Field(default="none", description="Patterns as in model.kv_sharing.")
    tie_rule: Literal["overwrite", "owner"] = "overwrite"
