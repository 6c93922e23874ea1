"""Data-parallel training: one model, several processes.

Every worker holds the whole model and takes its share of each step's rows; gradients are averaged
by PyTorch's DistributedDataParallel. A step has the same rows as with one worker, so the losses
are equal up to the order of summation.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kvlab.errors import ResourceError


@dataclass(frozen=True)
class WorkerGroup:
    """This process as worker ``rank`` of ``size``. A single worker needs no process group."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls, size: int) -> "WorkerGroup":
        """Return this process's position in the process group.

        Raises:
            ResourceError: the group does not have ``size`` workers.
        """
        has_group = dist.is_available() and dist.is_initialized()
        group = cls(dist.get_rank(), dist.get_world_size()) if has_group else cls()
        if group.size != size:
            text = f"the training is for {size} workers and runs in {group.size}"
            raise ResourceError(f"{text}; use the Ray executor, or resources.workers: {group.size}")
        return group

    @property
    def is_rank_zero(self) -> bool:
        """Whether this worker writes files and reports."""
        return self.rank == 0

    def row_slice(self, count: int) -> slice:
        """Return this worker's part of ``count`` rows, a multiple of ``size``."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """Sum ``value`` over all workers, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def broadcast_decision(self, decide: Callable[[], bool], device: torch.device) -> bool:
        """Return what ``decide`` returns on rank zero; the others do not call it."""
        if self.size == 1:
            return decide()
        decision = torch.tensor([self.is_rank_zero and decide()], dtype=torch.int32, device=device)
        dist.broadcast(decision, 0)
        return bool(decision.item())

    def wrap_module(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Return ``module`` with gradients averaged over the workers.

        All workers start from the parameters of rank zero.
        """
        if self.size == 1:
            return module
        ids = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(module, device_ids=ids)

    def no_sync(self, module: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """Return a context without gradient exchange, unless this is a step's last microbatch."""
        if self.size == 1 or is_last:
            return nullcontext()
        assert isinstance(module, nn.parallel.DistributedDataParallel)
        return module.no_sync()
