"""Recognize out-of-memory errors and faults of a device, without importing torch."""

import errno
import re
from typing import Literal

_DEVICE = re.compile(
    r"(cuda|hip|mps|nccl|gpu|accelerator)\b.*out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY"
    r"|\b(cublas|cudnn|cusolver|cusparse|cufft|hipblas|rocblas|miopen)(_status)?_alloc_failed",
    re.IGNORECASE | re.DOTALL,
)

# "could not create a primitive" is oneDNN's message for it; for operations that it does not
# support it says "could not create a primitive descriptor".
_HOST = re.compile(
    r"out of memory|not enough memory|can(no|')t allocate memory|bad_alloc"
    r"|could not create a primitive(?! descriptor)"
    r"|storage size calculation overflowed",
    re.IGNORECASE,
)

_FAULT = re.compile(
    r"\b(cuda|cudnn|cublas|hip)( driver)? error|\b(cudnn|cublas)_status_|triton error",
    re.IGNORECASE,
)


def classify_oom(error: BaseException) -> Literal["device", "host"] | None:
    """Return whose memory ran out, or None if ``error`` has another cause.

    Messages count only in a RuntimeError or OSError, which libraries raise from native code: a
    ValueError that mentions memory is about a value.
    """
    type_names = {kind.__name__ for kind in type(error).__mro__}
    message = str(error)
    if isinstance(error, MemoryError):
        return "host"
    if "OutOfMemoryError" in type_names:  # torch's, of any accelerator
        return "device"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "host"
    if not isinstance(error, RuntimeError | OSError):
        return None
    if _DEVICE.search(message):
        return "device"
    return "host" if _HOST.search(message) else None


def is_device_fault(error: BaseException) -> bool:
    """Return whether a GPU failed, for another reason than a lack of memory.

    A process that is killed or faults can take down the others that share its GPU.
    """
    is_native = isinstance(error, RuntimeError) and bool(_FAULT.search(str(error)))
    return is_native and classify_oom(error) is None
