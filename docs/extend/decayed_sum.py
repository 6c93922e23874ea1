"""A mixer: each head keeps a sum of its values that decays at a rate of its own, and no K/V."""

import torch
from torch.nn import Linear

from kvlab.extend import Extension, Mixer
from kvlab.model.attention import TokenMixer


class DecayedSum(Mixer):
    name = "decayed_sum"  # the value of mixer in model.kinds
    module = "DecayedSumModule"
    settings = ()

    def state(self, layer):
        return ((layer.n_head, 1, layer.head_dim),)

    def weights(self, model, number):
        return 2 * model.n_embd * model.layers[number].out_width

    def vectors(self, model, number):
        return 0

    def products(self, layer, tokens):
        return layer.out_width * tokens

    def decode_flops(self, layer, seen):
        return 3 * layer.out_width

    def saved_bytes(self, layer, tokens, item_bytes):
        return item_bytes * (2 * layer.out_width + layer.n_head * tokens)


class DecayedSumModule(TokenMixer):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.own = layer, config.layers[layer]
        self.value = Linear(config.n_embd, self.own.out_width, bias=False)
        self.proj = Linear(self.own.out_width, config.n_embd, bias=False)

    def forward(self, x, attention_pass, rotation):
        heads, count = self.own.n_head, x.shape[1]
        values = self.value(x).unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, H, C, D)
        context = attention_pass.read_kv(self.layer)
        at = torch.arange(count, device=x.device)
        decay = (1 - 2.0 ** -torch.arange(1, heads + 1, device=x.device)).to(x.dtype).view(-1, 1, 1)
        age = at[:, None] - at  # of what token i takes from token j
        weights = torch.where(age >= 0, decay ** age.clamp(min=0), 0)  # (H, C, C)
        if context.documents is not None:  # packed in a row, each begins anew
            ids = context.documents.ids
            weights = weights * (ids[:, None, :, None] == ids[:, None, None, :])
        y = weights @ values
        if context.parts:  # with a cache: what came before, and what comes to stay
            state = context.parts[0]
            y = y + (decay ** (at[:, None] + 1) * state).to(x.dtype)
            real = context.is_real  # rows of several lengths end in tokens that do not count
            new = x.new_full((len(x), 1), count) if real is None else real.sum(1, keepdim=True)
            left = decay[..., 0] ** (new - 1 - at).clamp(min=0)[:, None] * (at < new)[:, None]
            kept = decay ** new.view(-1, 1, 1, 1) * state
            attention_pass.write_kv(self.layer, kept + (left[..., None] * values).sum(2, True))
        attention_pass.end_layer(self.layer)
        return self.proj(y.transpose(1, 2).flatten(2))


extension = Extension(mixers=(DecayedSum(),))
