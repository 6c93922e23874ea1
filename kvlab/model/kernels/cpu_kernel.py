"""The contract of a CPU kernel: faster code beside the plain PyTorch that defines its result.

``KVLAB_PLAIN=1`` in the environment turns every kernel off, ``KVLAB_PLAIN=gelu,linear`` those two,
and `use_plain_code` all of them inside a block. Kernels and plain code agree within rounding, not
bit for bit.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

PLAIN_KERNELS = {name for name in os.environ.get("KVLAB_PLAIN", "").split(",") if name}
"""Names of kernels that are turned off; 1 stands for all."""

_kernels_are_on = "1" not in PLAIN_KERNELS


class CPUKernel(Generic[P, R]):
    """A function with a plain and a fast implementation.

    Args:
        name: by which ``KVLAB_PLAIN`` turns it off.
        plain: the reference, in plain PyTorch.
        select: takes the same arguments and returns the faster implementation for them, or None
            if the plain one is to be used: on other devices and dtypes, where it is no slower,
            and under `torch.compile`, which makes kernels of its own.
    """

    def __init__(
        self, name: str, plain: Callable[P, R], select: Callable[P, Callable[P, R] | None]
    ):
        self.name, self.plain, self.select = name, plain, select
        self._is_on = name not in PLAIN_KERNELS

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        fast = self.select(*args, **kwargs) if _kernels_are_on and self._is_on else None
        return self.plain(*args, **kwargs) if fast is None else fast(*args, **kwargs)

    def is_fast(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Return whether a call with these arguments runs the fast implementation."""
        return _kernels_are_on and self._is_on and self.select(*args, **kwargs) is not None


def is_plain_code_used() -> bool:
    """Return whether every kernel is turned off."""
    return not _kernels_are_on


@contextmanager
def use_plain_code() -> Iterator[None]:
    """Turn every kernel off inside the block."""
    global _kernels_are_on
    previous, _kernels_are_on = _kernels_are_on, False
    try:
        yield
    finally:
        _kernels_are_on = previous
