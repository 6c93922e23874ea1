"""The roofline of one decode step: its least time on a device (Williams et al., 2009).

A step moves bytes and does arithmetic; both can overlap, so it takes the longer of the two.
Counted are every weight matrix read once, one row of each embedding, the K/V that every layer
reads, the K/V that are written, and FLOPs as in `kvlab.spec.flops`. Activations and logits are
left out: they are small beside those at the batches of interest.

Weights are read at the rate of one-row matrix products of a large layer, which may be below the
memory's bandwidth; all else is moved at the bandwidth.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from kvlab.humanize import format_count
from kvlab.layout.kv_layout import KVLayout
from kvlab.spec import ServingConfig
from kvlab.spec.dtypes import DTYPES
from kvlab.spec.flops import layer_weights, matrix_weights
from kvlab.spec.model_config import ModelConfig

PAYOFF_RATIO = 0.9
"""A layout pays off where its step takes at most this share of the other layout's time."""

MAX_BREAK_EVEN = 2**20
"""The largest context or batch that is searched for a break-even."""


@dataclass(frozen=True)
class DevicePeaks:
    """The highest rates that a device reaches.

    Attributes:
        dtype: of the matrix products.
        threads: of the CPU; 0 on other devices.
        bandwidth: of the memory, in bytes/s.
        flops: of matrix products, in FLOP/s.
        product_bandwidth: bytes/s at which one-row products read a large layer's weights; None:
            the bandwidth itself.
        disturbance: what else used the device while the rates were measured; empty if nothing did.
    """

    device: str
    dtype: str
    threads: int
    bandwidth: float
    flops: float
    product_bandwidth: float | None = None
    disturbance: str = ""

    @property
    def name(self) -> str:
        threads = f", {format_count(self.threads, 'thread')}" if self.threads else ""
        return f"{self.device}{threads}, {self.dtype}"


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

    def seconds(self, peaks: DevicePeaks) -> float:
        """Return the least time of the step: the longer of moving bytes and computing."""
        return max(self._moving_seconds(peaks), self.flops / peaks.flops)

    def bound(self, peaks: DevicePeaks) -> Literal["memory", "compute"]:
        """Return what limits the step."""
        is_memory_bound = self._moving_seconds(peaks) >= self.flops / peaks.flops
        return "memory" if is_memory_bound else "compute"

    def _moving_seconds(self, peaks: DevicePeaks) -> float:
        reading = self.weight_bytes / (peaks.product_bandwidth or peaks.bandwidth)
        return reading + (self.kv_read_bytes + self.kv_written_bytes) / peaks.bandwidth

    def mbu(self, seconds: float, peaks: DevicePeaks) -> float:
        """Return the model bandwidth utilization of a step that took ``seconds``: weights and K/V
        read each second, as a share of the bandwidth (1 is the most)."""
        return (self.weight_bytes + self.kv_read_bytes) / seconds / peaks.bandwidth

    def mfu(self, seconds: float, peaks: DevicePeaks) -> float:
        """Return the model FLOPs utilization of a step that took ``seconds``: FLOPs each second,
        as a share of the matrix rate."""
        return self.flops / seconds / peaks.flops


def decode_flops(model: ModelConfig, context_length: int, layout: KVLayout | None = None) -> int:
    """Return the FLOPs to decode one token of a context of ``context_length`` tokens, with itself.

    Args:
        layout: Of the cache that serves: it may drop tokens, or leave K/V of layers unwritten.
            Default: that of the model as it was trained.
    """
    layout = layout or KVLayout.of(model)
    attention = 0
    for layer, plan in zip(model.layers, layout.plans, strict=True):
        attention += layer.mixer.decode_flops(layer, plan.count_seen(context_length))
    return 2 * _served_weights(model, layout) + attention


def prefill_flops(model: ModelConfig, tokens: int, layout: KVLayout | None = None) -> int:
    """Return the FLOPs of a prompt of ``tokens`` tokens, up to the logits of its last one.

    The head and the last layer's MLP compute that token alone, and so do all layers from
    `KVLayout.first_reader` on. Those below are counted as in `forward_flops`.

    Args:
        layout: Of the cache that serves. Default: that of the model as it was trained.
    """
    layout = layout or KVLayout.of(model)
    total = 2 * _served_weights(model, layout)  # the last token, in all layers and the head
    for number, (layer, plan) in enumerate(zip(model.layers, layout.plans, strict=True)):
        if number >= layout.first_reader:
            total += layer.mixer.decode_flops(layer, plan.count_seen(tokens))
            continue
        mixed = layer.mixer.products(layer, tokens)
        weights = layer_weights(model, number) - _unused_weights(model, layout, number)
        if number == model.n_layer - 1:
            weights -= model.n_embd * model.ffn_dim * model.mlp_matrices
        total += 2 * (tokens * mixed + (tokens - 1) * weights)
    return total


def _served_weights(model: ModelConfig, layout: KVLayout) -> int:
    """Return how many weights multiply a token: K and V that nobody reads are not made."""
    unused = (_unused_weights(model, layout, layer) for layer in range(model.n_layer))
    return matrix_weights(model) - sum(unused)


def _unused_weights(model: ModelConfig, layout: KVLayout, layer: int) -> int:
    is_unused = model.kv_owners[layer] == layer and not layout.writers[layer]
    return model.n_embd * model.layers[layer].store_width if is_unused else 0


def decode_step_cost(
    model: ModelConfig, serving: ServingConfig, batch_size: int, context_length: int, dtype: str
) -> StepCost:
    """Return the FLOPs and bytes to decode one token of each of ``batch_size`` sequences.

    Args:
        context_length: tokens of each sequence after the step.
        dtype: the model's.
    """
    layout = KVLayout.of(model, serving)
    rows = 1 + model.position_scheme.has_embedding  # one of each embedding
    weights = _served_weights(model, layout) + rows * model.n_embd
    return StepCost(
        flops=batch_size * decode_flops(model, context_length, layout),
        weight_bytes=DTYPES[dtype].item_bytes * weights,
        kv_read_bytes=layout.read_bytes(batch_size, context_length, dtype),
        kv_written_bytes=layout.written_bytes(batch_size, dtype),
    )


def find_break_even(
    model: tuple[ModelConfig, ServingConfig],
    base: tuple[ModelConfig, ServingConfig],
    peaks: DevicePeaks,
    *,
    batch_size: int | None = None,
    context_length: int | None = None,
) -> range | None:
    """Return where a layout pays off against ``base``, by the roofline of both.

    Exactly one of ``batch_size`` and ``context_length`` is given.

    Returns:
        The values of the other one for which the step takes at most `PAYOFF_RATIO` of the base's
        time, up to `MAX_BREAK_EVEN`; None without any. A prompt that is reduced saves a fixed
        number of tokens, which pays off in contexts that are not much longer.
    """
    assert (batch_size is None) != (context_length is None), "one is fixed, the other searched"

    def pays_off(value: int) -> bool:
        batch, context = batch_size or value, context_length or value
        seconds, base_seconds = (
            decode_step_cost(*each, batch, context, peaks.dtype).seconds(peaks)
            for each in (model, base)
        )
        return seconds <= PAYOFF_RATIO * base_seconds

    tried = [1 << power for power in range(MAX_BREAK_EVEN.bit_length())]
    paying = [pays_off(value) for value in tried]
    if not any(paying):
        return None
    first = paying.index(True)
    last = paying.index(False, first) if False in paying[first:] else len(tried)
    low, high = tried[first] // 2 + 1, tried[last - 1]
    start = low + bisect_left(range(low, tried[first]), True, key=pays_off)
    if last < len(tried):
        beyond = range(high + 1, tried[last])
        high += bisect_left(beyond, True, key=lambda value: not pays_off(value))
    return range(start, high + 1)
