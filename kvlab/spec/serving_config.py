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
        default="model",
        description="How K/V are stored; model keeps the model's dtype.",
        examples=["int8"],
    )
    tie: SharingField = Field(
        default="none",
        description="Layers that share one cache slot at serving, though each was"
        " trained with its own K/V. Patterns as in model.kv_sharing.",
        examples=["adjacent:2"],
    )
    tie_rule: Literal["overwrite", "owner"] = Field(
        default="overwrite",
        description="Who writes a tied slot: every layer, so that the last one wins"
        " (overwrite), or its first layer alone (owner).",
        examples=["owner"],
        json_schema_extra={"given": {"tie": "adjacent:2"}},
    )
