"""`resources` of an experiment: where a trial runs."""

from typing import Annotated, Literal

from pydantic import Field

from kvlab.spec.spec_model import PositiveInt, Problems, SpecModel, TextRule

_GPU_NAME = TextRule(r"^\w[\w.-]{0,63}$", "is no kind of GPU; use Ray's name for it, such as H100")


class ResourcesConfig(SpecModel):
    """`resources`: where a trial runs. Never part of what it computes."""

    cpus: Annotated[float, Field(gt=0, le=4096)] = 1.0
    """Cores of a trial, and its threads; a fraction shares one. Unit: cores. Example: 2"""
    gpus: Annotated[float, Field(ge=0, le=1024)] | Literal["auto"] = 0.0
    """A number, a fraction to share one, or auto: as many trials on one as its memory holds,
    measured before they start.
    Unit: GPUs. Example: auto"""
    workers: Annotated[PositiveInt, Field(le=1024)] | None = None
    """Processes that train together. Unit: processes. Default: one a whole GPU. Example: 2"""
    accelerator_type: Annotated[str, _GPU_NAME] | None = None
    """Kind of GPU, by Ray's name for it, where a cluster has several.
    Default: any. Example: H100, gpus: 1"""
    microbatch_tokens: PositiveInt | None = None
    """Tokens of a forward pass; smaller needs less memory, same mathematics.
    Unit: tokens. Default: all that a process computes in a step. Example: 1024"""

    def _find_problems(self) -> Problems:
        if self.devices > 1 and not self.devices.is_integer():
            text = "is above 1 and not whole; use a fraction of one GPU or whole GPUs"
            yield "gpus", text
        elif self.devices and self.workers not in (None, max(1, int(self.devices))):
            yield "workers", f"is not the number of GPUs, {self.devices:g}; remove it"
        if self.accelerator_type is not None and not self.devices:
            yield "accelerator_type", "is a kind of GPU, and gpus is 0; remove it or set gpus"

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

    @property
    def one_worker(self) -> "ResourcesConfig":
        """The part of one of the workers, with which a trial is measured."""
        part = {"cpus": self.cpus / self.training_workers, "gpus": min(1.0, self.devices)}
        return self.model_copy(update={**part, "workers": 1})
