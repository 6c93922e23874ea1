"""`resources` of an experiment: where a trial runs."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvlab.spec.spec_model import PositiveInt, SpecModel, raise_problems


class ResourcesConfig(SpecModel):
    """`resources`: where a trial runs. Never part of what it computes."""

    cpus: Annotated[float, Field(gt=0, le=4096)] = Field(
        default=1.0,
        description="Cores of a trial, and its threads; a fraction shares one.",
        examples=[2.0],
        json_schema_extra={"unit": "cores"},
    )
    gpus: Annotated[float, Field(ge=0, le=1024)] | Literal["auto"] = Field(
        default=0.0,
        description="A number, a fraction to share one, or auto: as many trials on one as its"
        " memory holds, measured before they start.",
        examples=["auto"],
        json_schema_extra={"unit": "GPUs"},
    )
    workers: Annotated[PositiveInt, Field(le=1024)] | None = Field(
        default=None,
        description="Processes that train together.",
        examples=[2],
        json_schema_extra={"unit": "processes", "computed_default": "one a whole GPU"},
    )
    microbatch_tokens: PositiveInt | None = Field(
        default=None,
        description="Tokens of a forward pass; smaller needs less memory, same mathematics.",
        examples=[1024],
        json_schema_extra={
            "unit": "tokens",
            "computed_default": "all that a process computes in a step",
        },
    )

    @model_validator(mode="after")
    def _check(self) -> "ResourcesConfig":
        if self.devices > 1 and not self.devices.is_integer():
            text = "is above 1 and not whole; use a fraction of one GPU or whole GPUs"
            raise_problems([("gpus", text)])
        if self.devices and self.workers not in (None, max(1, int(self.devices))):
            text = f"is not the number of GPUs, {self.devices:g}; remove it"
            raise_problems([("workers", text)])
        return self

    @property
    def devices(self) -> float:
        """The number of GPUs requested; 1 for ``auto``, which is settled before a trial starts."""
        return 1.0 if self.gpus == "auto" else self.gpus

    @property
    def shares_gpu(self) -> bool:
        """Whether other trials may run on its GPU at the same time."""
        return 0 < self.devices < 1

    @property
    def training_workers(self) -> int:
        """The number of processes that train together, each with one device."""
        return self.workers or max(1, int(self.devices))
