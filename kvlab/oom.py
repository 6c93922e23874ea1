"""Whether an error says that memory is gone, and whose; by name and word, so without torch."""

import errno
import re
from typing import Literal

MemoryKind = Literal["device", "host"]

_DEVICE = re.compile(
    r"(cuda|hip|mps|nccl|gpu|accelerator)\b.*out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY"
    r"|\b(cublas|cudnn|cusolver|cusparse|cufft|hipblas|rocblas|miopen)(_status)?_alloc_failed",
    re.IGNORECASE | re.DOTALL,
)

# The last is oneDNN's word for it. Of what it does not support it says that it "could not create
# a primitive descriptor".
_HOST = re.compile(
    r"out of memory|not enough memory|can(no|')t allocate memory|bad_alloc"
    r"|could not create a primitive(?! descriptor)"
    r"|storage size calculation overflowed",
    re.IGNORECASE,
)


def classify_oom(error: BaseException) -> MemoryKind | None:
    """Whose memory an error says is gone: the device's or the host's; None of any other error.

    Libraries have types for it or only words. Words count in what libraries raise from below
    Python, a RuntimeError or an OSError: a ValueError that speaks of memory is about a value.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error)
    if isinstance(error, MemoryError):
        return "host"
    if "OutOfMemoryError" in names:  # torch's, of any accelerator
        return "device"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "host"
    if not isinstance(error, RuntimeError | OSError):
        return None
    if _DEVICE.search(text):
        return "device"
    return "host" if _HOST.search(text) else None
