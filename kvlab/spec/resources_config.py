"""`resources` of an experiment: where a trial runs."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvlab.spec.spec_model import PositiveInt, SpecModel, example, raise_problems


class ResourcesConfig(SpecModel):
    """`resources`: where a trial runs. Never part of what it computes."""

    cpus: Annotated[float, Field(gt=0, le=4096), example(2.0, "cores")] = 1.0
    """Cores of a trial, and its threads; a fraction shares one."""
    gpus: Annotated[
        Annotated[float, Field(ge=0, le=1024)] | Literal["auto"], example("auto", "GPUs")
    ] = 0.0
    """A number, a fraction to share one, or auto: as many trials on one as its memory holds,
    measured before they start."""
    workers: Annotated[
        Annotated[PositiveInt, Field(le=1024)] | None,
        example(2, "processes", default="one a whole GPU"),
    ] = None
    """Processes that train together."""
    microbatch_tokens: Annotated[
        PositiveInt | None, example(1024, "tokens", default="all that a process computes in a step")
    ] = None
    """Tokens of a forward pass; smaller needs less memory, same mathematics."""

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
