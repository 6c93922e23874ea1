"""Triton, where it is installed, and whether its kernels can run."""

import os
import shutil
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from kvlab.model.kernels.cpu_kernel import is_plain_code_used

__all__ = ["are_kernels_usable", "jit", "tl", "triton"]

try:
    import triton
    import triton.language as tl
except ImportError:  # not on this platform: nothing here is called
    triton, tl = None, SimpleNamespace(constexpr=Any)


def jit(function: Any) -> Any:
    """Return a kernel of Triton, or the function as it is where there is no Triton."""
    return function if triton is None else triton.jit(function)


def are_kernels_usable(device: torch.device) -> bool:
    """Return whether the kernels run on ``device``: CUDA, with Triton and a C compiler."""
    return device.type == "cuda" and not is_plain_code_used() and _has_compiler()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_compiler() -> bool:
    return _find_compiler()


@lru_cache(maxsize=1)
def _find_compiler() -> bool:
    compilers = (os.environ.get("CC"), "gcc", "clang", "cc")
    return triton is not None and any(shutil.which(name) for name in compilers if name)
