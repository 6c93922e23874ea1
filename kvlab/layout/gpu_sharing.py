"""How many trials share a GPU, from the memory that one of them was measured to take.

The allocator's peak is not everything: every process also holds a CUDA context and the workspace
of libraries, which no allocator counts and no fraction limits.
"""

from kvlab.errors import ResourceError
from kvlab.humanize import format_bytes

CONTEXT_BYTES = 768 * 2**20
"""Bytes of one process outside the allocator. CUDA's context and cuBLAS take 0.3 to 0.6 GB."""

PEAK_MARGIN = 1.1
"""Factor on the measured peak: later steps may fragment the allocator's memory more."""

MAX_TRIALS_PER_DEVICE = 16
"""With more, the steps of one trial wait for those of the others."""


def trials_per_device(peak_bytes: int, device_bytes: int) -> int:
    """Return how many trials of ``peak_bytes`` each run side by side in ``device_bytes``."""
    each = peak_bytes * PEAK_MARGIN + CONTEXT_BYTES
    return max(1, min(MAX_TRIALS_PER_DEVICE, int(device_bytes / each)))


def device_share(count: int) -> float:
    """Return the fraction of a device that each of ``count`` trials requests.

    Rounded down to the four digits that Ray counts.
    """
    return 10_000 // count / 10_000


def allocator_share(gpus: float, device_bytes: int) -> float:
    """Return the fraction of a device's memory that a process of ``gpus`` may allocate, without
    its context.

    Raises:
        ResourceError: nothing would be left.
    """
    if gpus >= 1:
        return 1.0
    share = gpus - CONTEXT_BYTES / device_bytes
    if share <= 0:
        text = f"resources.gpus = {gpus:g} of {format_bytes(device_bytes)} is less than a process"
        least = CONTEXT_BYTES / device_bytes
        raise ResourceError(f"{text} takes before it trains; use more than {least:.2g}")
    return share
