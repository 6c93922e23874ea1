"""A form of K/V with a setting: a token stores as many numbers of V as the YAML says."""

from torch import nn

from kvlab.extend import Extension, KVForm, SpecModel, StoredVectors
from kvlab.model.attention import Keys, SeparateKV, decode_stored


class Narrow(SpecModel):
    size: int = 8  # numbers of V that a token stores for each head


class NarrowValues(KVForm):
    name = "narrow_values"
    view = "NarrowValuesView"
    parts = ("k", "v")
    options = Narrow

    def stored(self, layer):
        keys = StoredVectors(layer.n_kv_head, layer.head_dim)
        return keys, StoredVectors(layer.n_kv_head, self.options.size)

    def up_weights(self, layer):
        return layer.head_dim * self.options.size


class NarrowValuesView(SeparateKV):
    def __init__(self, layer, owns_kv, norm_eps):
        super().__init__(layer, owns_kv, norm_eps)
        self.up = nn.Linear(layer.kv_form.options.size, layer.head_dim, bias=False)

    def attend(self, q, parts, rope, attend):
        k, v = parts
        return attend(q, Keys(k), self.up(decode_stored(v, q.dtype)))


extension = Extension(kv_forms=(NarrowValues(),))
