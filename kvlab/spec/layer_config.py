"""What attention needs to know of one layer, resolved from `model` once for all who ask.

`ModelConfig.layers` has one `LayerConfig` a layer. The byte arithmetic, the FLOPs, the cache and
the model read it, so that what differs between layers is decided in one place.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StoredVectors:
    """What one token stores of K, or of V, in one layer: ``count`` vectors of ``size`` numbers."""

    count: int
    size: int


@dataclass(frozen=True)
class LayerConfig:
    """The attention of one layer.

    Attributes:
        kind: its letter in ``attention_pattern``. Layers of one kind are equal.
        n_head: query heads.
        n_kv_head: K/V heads.
        head_dim: numbers of one head of Q, K and V.
        window: tokens that a token sees, itself included; None for all before it.
        rotary_dim: the leading dimensions of a head of Q and K that are rotated; 0 for none.
        rope_theta: base of their frequencies.
    """

    kind: str
    n_head: int
    n_kv_head: int
    head_dim: int
    window: int | None
    rotary_dim: int
    rope_theta: float

    @property
    def rotation(self) -> tuple[int, float]:
        """What determines the rotary table of the layer: rotated dimensions and their base."""
        return self.rotary_dim, self.rope_theta

    @property
    def q_width(self) -> int:
        """Numbers of all query heads of a token, and of what they attend to."""
        return self.n_head * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers of K, and of V, that a token's projections give."""
        return self.n_kv_head * self.head_dim

    @property
    def stored(self) -> tuple[StoredVectors, StoredVectors]:
        """What one token stores in the layer's cache slot: of K, and of V."""
        vectors = StoredVectors(self.n_kv_head, self.head_dim)
        return vectors, vectors

    def visible_tokens(self, tokens: int) -> int:
        """Return how many of ``tokens`` the last one sees; its slot holds as many."""
        return tokens if self.window is None else min(tokens, self.window)
