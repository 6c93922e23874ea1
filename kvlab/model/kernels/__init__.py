"""CPU kernels: what makes training and decoding on CPU faster than plain PyTorch.

Each file holds one kernel and its plain reference, behind the contract in
`kvlab.model.kernels.cpu_kernel`. The measurements behind their limits are in
``kvlab/benchmark/LOG.md``. Those of CUDA are in modules named ``triton_``.
"""

from typing import Any

from kvlab.model.kernels.cpu_kernel import PLAIN_KERNELS, CPUKernel
from kvlab.model.kernels.gelu import gelu
from kvlab.model.kernels.linear import linear, matmul_transposed
from kvlab.model.kernels.malloc import keep_freed_memory
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

_unknown = PLAIN_KERNELS - {*KERNELS, "0", "1"}
if _unknown:
    _text = f"KVLAB_PLAIN = {', '.join(sorted(_unknown))} is no kernel; use 1 for all, or some of"
    raise ValueError(f"{_text} {', '.join(KERNELS)}")
