"""The roofline of one decode step: how fast a device could do it at best (Williams et al., 2009).

A step moves bytes and does arithmetic; both can overlap, so it takes the longer of the two. Weights
are read as fast as one-row matrix products of a large layer read them, which is near the memory's
bandwidth and not always at it; all else at the bandwidth. What is counted: every weight matrix
read once, one row of each embedding, the K/V that every layer reads, and the K/V that are written;
FLOPs as in `kvlab.layout.flops`. Left out are activations and logits, which are small beside them
at the batches of interest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvlab.layout.flops import decode_flops, weight_bytes_read
from kvlab.layout.kv_layout import KVLayout
from kvlab.spec import ServingConfig
from kvlab.spec.dtypes import DTYPES
from kvlab.spec.model_config import ModelConfig

Bound = Literal["memory", "compute"]

PAYOFF_RATIO = 0.9
"""A layout pays where its step takes at most this share of the other layout's time."""

MAX_BREAK_EVEN = 2**20
"""Contexts and batches beyond this are not looked at for a break-even."""


@dataclass(frozen=True)
class DevicePeaks:
    """What a device reaches at most: bytes/s from its memory, FLOP/s of matrix products.

    ``dtype`` is that of the matrix products; ``threads`` is 0 where there is no such choice.
    ``product_bandwidth`` is the bytes/s at which one-row products read a large layer's weights;
    None: the bandwidth itself.
    """

    device: str
    dtype: str
    threads: int
    bandwidth: float
    flops: float
    product_bandwidth: float | None = None

    @property
    def name(self) -> str:
        threads = f", {self.threads} threads" if self.threads > 1 else ""
        one = ", 1 thread" if self.threads == 1 else ""
        return f"{self.device}{threads}{one}, {self.dtype}"


@dataclass(frozen=True)
class StepCost:
    """Exact FLOPs and bytes of one decode step of a whole batch."""

    flops: int
    weight_bytes: int
    kv_read_bytes: int
    kv_written_bytes: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes

    def seconds(self, ceilings: DevicePeaks) -> float:
        """The time that the step takes: the longer of moving and computing."""
        return max(self._moving(ceilings), self.flops / ceilings.flops)

    def _moving(self, ceilings: DevicePeaks) -> float:
        reading = self.weight_bytes / (ceilings.product_bandwidth or ceilings.bandwidth)
        return reading + (self.kv_read_bytes + self.kv_written_bytes) / ceilings.bandwidth

    def bound(self, ceilings: DevicePeaks) -> Bound:
        computing = self.flops / ceilings.flops
        return "memory" if self._moving(ceilings) >= computing else "compute"

    def bandwidth_use(self, seconds: float, ceilings: DevicePeaks) -> float:
        """MBU: weights and K/V read each second, as a share of the bandwidth (1 is the most)."""
        return (self.weight_bytes + self.kv_read_bytes) / seconds / ceilings.bandwidth

    def flops_use(self, seconds: float, ceilings: DevicePeaks) -> float:
        """MFU: FLOPs each second as a share of the matrix rate."""
        return self.flops / seconds / ceilings.flops


def decode_step_cost(
    model: ModelConfig, serving: ServingConfig, batch_size: int, context_length: int, dtype: str
) -> StepCost:
    """FLOPs and bytes to decode one token of each of ``batch_size`` sequences, each of which
    then holds ``context_length`` tokens."""
    layout = KVLayout.of(model, serving)
    return StepCost(
        flops=batch_size * decode_flops(model, context_length),
        weight_bytes=weight_bytes_read(model, DTYPES[dtype].item_bytes),
        kv_read_bytes=layout.read_bytes(batch_size, context_length, dtype),
        kv_written_bytes=layout.written_bytes(batch_size, dtype),
    )


def find_break_even(
    shape: tuple[ModelConfig, ServingConfig],
    base: tuple[ModelConfig, ServingConfig],
    ceilings: DevicePeaks,
    *,
    batch_size: int | None = None,
    context_length: int | None = None,
) -> int | None:
    """Where a layout starts to pay against ``base``, by the roofline of both.

    Exactly one of ``batch_size`` and ``context_length`` is given: the least value of the other
    from which on the step takes at most `PAYS` of the base's time.

    Returns:
        None if it does not pay up to `FURTHEST`.
    """
    assert (batch_size is None) != (context_length is None), "one is fixed, the other sought"

    def pays(value: int) -> bool:
        batch, context = (batch_size, value) if batch_size else (value, context_length)
        assert batch is not None
        assert context is not None
        mine = decode_step_cost(*shape, batch, context, ceilings.dtype).seconds(ceilings)
        theirs = decode_step_cost(*base, batch, context, ceilings.dtype).seconds(ceilings)
        return mine <= PAYOFF_RATIO * theirs

    return _smallest_true(pays, MAX_BREAK_EVEN)


def _smallest_true(holds: Callable[[int], bool], last: int) -> int | None:
    """The least of 1 to ``last`` that holds, for what holds from somewhere on."""
    high = 1
    while not holds(high):
        if high >= last:
            return None
        high = min(2 * high, last)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
