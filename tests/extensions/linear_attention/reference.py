"""The gated delta rule as its paper has it, token by token in dense float64; no code of kvlab."""

from dataclasses import dataclass, field

import numpy as np

from tests.support.reference_model import ReferenceModel


def run_rule(q, k, v, log_decay, rate, state):
    """Take tokens into one state; return what their queries read, and the state.

    Args:
        q: (tokens, queries, numbers); k, v: (tokens, numbers); log_decay, rate: (tokens,).
        state: (numbers of a value, numbers of a key), the paper's S.
    """
    out, identity = [], np.eye(state.shape[1])
    for t in range(len(k)):
        key = k[t][:, None]
        state = state @ (np.exp(log_decay[t]) * (identity - rate[t] * key @ key.T))
        state = state + rate[t] * v[t][:, None] @ key.T
        out.append(q[t] @ state.T)
    return np.array(out), state


def silu(x):
    return x / (1 + np.exp(-x))


def at_length_one(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


@dataclass
class DeltaReference(ReferenceModel):
    """A model whose layers D are gated DeltaNet."""

    states: dict = field(default_factory=dict)

    def setting(self, layer, name):
        letter = (self.config.attention_pattern * self.config.n_layer)[layer]
        if letter == "D" and name == "window":
            return 0  # it stores no tokens, so that eviction has none to drop
        return super().setting(layer, name)

    def attention(self, layer, x, positions, current):
        c = self.config
        letter = (c.attention_pattern * c.n_layer)[layer]
        if letter != "D":
            return super().attention(layer, x, positions, current)
        own = c.kinds.get("D")
        head_dim = (own and own.head_dim) or c.head_dim
        count = (own and own.n_kv_head) or c.n_kv_head
        name, w = f"blocks.{layer}.attention.", self.weights

        def project(part):
            return x @ w[f"{name}{part}.weight"].T + w.get(f"{name}{part}.bias", 0.0)

        q, k, v = (silu(project(part)).reshape(len(x), -1, head_dim) for part in "qkv")
        q, k = at_length_one(q) / np.sqrt(head_dim), at_length_one(k)
        softplus = np.log1p(np.exp(project("alpha") + w[name + "offset"]))
        log_decay = -np.exp(w[name + "log_scale"]) * softplus
        rate = 1 / (1 + np.exp(-project("beta")))
        group, outs = c.n_head // count, []
        for head in range(count):
            state = self.states.get((layer, head), np.zeros((head_dim, head_dim)))
            queries = q[:, head * group : (head + 1) * group]
            tokens = queries, k[:, head], v[:, head], log_decay[:, head], rate[:, head]
            out, self.states[layer, head] = run_rule(*tokens, state)
            outs.append(out)
        y = np.concatenate(outs, 1)
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + c.norm_eps) * w[name + "norm.weight"]
        y = y.reshape(len(x), -1) * silu(project("gate"))
        return y @ w[name + "proj.weight"].T + w.get(name + "proj.bias", 0.0)
