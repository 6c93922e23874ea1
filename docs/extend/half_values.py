"""A form of K/V: a token stores half of V, which a matrix widens when it is read."""

from torch import nn

from kvlab.extend import Extension, KVForm, StoredVectors
from kvlab.model.attention import Keys, SeparateKV, decode_stored


class HalfValues(KVForm):
    name = "half_values"  # the value of model.kv
    view = "HalfValuesView"
    parts = ("k", "v")

    def stored(self, layer):
        keys = StoredVectors(layer.n_kv_head, layer.head_dim)
        return keys, StoredVectors(layer.n_kv_head, layer.head_dim // 2)

    def up_weights(self, layer):
        return layer.head_dim * layer.head_dim // 2


class HalfValuesView(SeparateKV):
    def __init__(self, layer, owns_kv, norm_eps):
        super().__init__(layer, owns_kv, norm_eps)
        self.up = nn.Linear(layer.head_dim // 2, layer.head_dim, bias=False)

    def attend(self, q, parts, rope, attend):
        k, v = parts
        return attend(q, Keys(k), self.up(decode_stored(v, q.dtype)))


extension = Extension(kv_forms=(HalfValues(),))
