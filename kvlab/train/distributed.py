"""The processes that train one model together, as each of them sees it.

Data-parallel: every worker holds the whole model, takes its share of each step's rows, and the
gradients are summed (torch's DistributedDataParallel). The rows of a step are those of one
worker, so the losses are too, but for the order of sums.
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
    """Worker ``rank`` of ``size``; one alone needs no process group."""

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls, wanted: int) -> "WorkerGroup":
        """This process's place in the process group.

        Raises:
            ResourceError: there are not ``wanted`` workers.
        """
        joined = dist.is_available() and dist.is_initialized()
        found = cls(dist.get_rank(), dist.get_world_size()) if joined else cls()
        if found.size != wanted:
            text = f"the training is for {wanted} workers and runs in {found.size}"
            raise ResourceError(f"{text}; use the Ray executor, or resources.workers: {found.size}")
        return found

    @property
    def leads(self) -> bool:
        """Whether this one writes files and speaks."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This worker's part of ``count`` rows, which ``size`` divides."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def summed(self, value: Tensor) -> Tensor:
        """The sum of all workers' values, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def agree(self, ask: Callable[[], bool], device: torch.device) -> bool:
        """What the leader answers; the others do not ask."""
        if self.size == 1:
            return ask()
        answer = torch.tensor([self.leads and ask()], dtype=torch.int32, device=device)
        dist.broadcast(answer, 0)
        return bool(answer.item())

    def wrapped(self, module: nn.Module, device: torch.device) -> nn.Module:
        """``module`` with gradients that are means over the workers; all start as the leader's."""
        if self.size == 1:
            return module
        ids = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(module, device_ids=ids)

    def gradients_later(self, module: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """While accumulating: gradients travel only in the last part of a step."""
        if self.size == 1 or is_last:
            return nullcontext()
        assert isinstance(module, nn.parallel.DistributedDataParallel)
        return module.no_sync()
