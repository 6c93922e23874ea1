"""CPU kernels: what makes training and decoding on CPU faster than plain PyTorch.

Each file holds one kernel and its plain reference, behind the contract in
`kvlab.model.kernels.cpu_kernel`. The measurements behind their limits are in
``kvlab/benchmark/LOG.md``. Those of CUDA are in modules named ``triton_``.
"""

from typing import Any

from kvlab.model.kernels.cpu_kernel import CPUKernel, use_plain_code
from kvlab.model.kernels.gelu import gelu
from kvlab.model.kernels.int8 import INT8_KERNELS, Int8Linear, select_int8_kernel
from kvlab.model.kernels.linear import Linear, linear, matmul_transposed
from kvlab.model.kernels.malloc import (
    keep_freed_memory,
    read_status_bytes,
    reset_resident_peak,
    return_free_memory,
    return_freed_memory,
)
from kvlab.model.kernels.rotate_pairs import rotate_pairs
from kvlab.model.kernels.tiled_attention import tiled_attention

KERNELS: dict[str, CPUKernel[Any, Any]] = {
    "linear": linear,
    "matmul_transposed": matmul_transposed,
    "gelu": gelu,
    "rotate_pairs": rotate_pairs,
    "tiled_attention": tiled_attention,
    "keep_freed_memory": keep_freed_memory,
}

__all__ = [
    "INT8_KERNELS",
    "KERNELS",
    "CPUKernel",
    "Int8Linear",
    "Linear",
    "gelu",
    "keep_freed_memory",
    "linear",
    "matmul_transposed",
    "read_status_bytes",
    "reset_resident_peak",
    "return_free_memory",
    "return_freed_memory",
    "rotate_pairs",
    "select_int8_kernel",
    "tiled_attention",
    "use_plain_code",
]
