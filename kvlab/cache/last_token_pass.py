"""The part of a pass over prompts that needs each row's last token alone.

Where the upper layers write no K/V (``trailing:K``, as in YOCO, arXiv 2405.05254), nothing reads
what they compute for the other tokens of a prompt.
"""

from dataclasses import replace

from torch import Tensor

from kvlab.cache.attention_pass import AttentionPass, KVContext
from kvlab.layout.kv_layout import find_first_reader
from kvlab.spec.layer_config import LayerConfig


def count_writing_layers(attention_pass: AttentionPass, layers: int) -> int:
    """Return how many of the lower layers it takes to store all K/V of a pass."""
    return find_first_reader([attention_pass.writes_kv(layer) for layer in range(layers)])


class LastTokenPass(AttentionPass):
    """A pass of several tokens of each row, as layers see it that run on the last of them.

    Args:
        whole: the pass that the layers below have run in. Where it has no masks, a row's last token
            is the pass's last.
        indices: (B,) of the rows' last tokens in the flattened rows of the pass.
        layers: the window of each layer.
    """

    def __init__(self, whole: AttentionPass, indices: Tensor, layers: tuple[LayerConfig, ...]):
        self._whole, self._layers = whole, layers
        self.end, self.position_limit = whole.end, whole.position_limit
        self._columns: Tensor | None = None
        self.positions = whole.positions[..., -1:]
        if whole.positions.dim() == 2:
            self._columns = (indices % whole.positions.shape[1])[:, None]
            self.positions = whole.positions.gather(1, self._columns)

    def writes_kv(self, layer: int) -> bool:  # noqa: ARG002
        return False

    def write_kv(self, layer: int, *parts: Tensor) -> None:  # noqa: ARG002
        raise AssertionError("a layer that writes needs all tokens")

    def read_kv(self, layer: int) -> KVContext:
        context = self._whole.read_kv(layer)
        assert context.documents is None, "a prompt is one document"
        if context.mask is None:
            keys = context.parts[0].shape[2]
            window, _ = context.band or (self._layers[layer].window, 0)
            sees_all = window is None or window >= keys
            return replace(context, is_causal=context.is_causal and not sees_all)
        mask = context.mask[:, :, -1:]
        if self._columns is not None:
            rows, (_, heads, _, keys) = len(self._columns), context.mask.shape
            index = self._columns[:, None, :, None].expand(rows, heads, 1, keys)
            mask = context.mask.expand(rows, -1, -1, -1).gather(2, index)
        return replace(context, mask=mask)

    def key_positions(self, layer: int) -> Tensor:
        return self._whole.key_positions(layer)

    def end_layer(self, layer: int) -> None:
        self._whole.end_layer(layer)

    def finish(self) -> None:
        self._whole.finish()
