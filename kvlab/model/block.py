"""One transformer layer: pre-norm attention and MLP, each on the residual stream."""

import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.cache import Step
from kvlab.model.attention import Attention
from kvlab.model.gelu import gelu
from kvlab.model.linear import Linear
from kvlab.model.rotary import Rotation
from kvlab.spec.model import ModelConfig


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm of the residual stream."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


class MLP(nn.Module):
    """``gelu`` (tanh form, as GPT-2) or ``swiglu`` (arXiv 2002.05202), whose ``up`` holds gate
    and value rows in this order."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.is_gated = config.mlp == "swiglu"
        inner = config.ffn_dim * (2 if self.is_gated else 1)
        self.up = Linear(config.n_embd, inner, bias=config.bias)
        self.down = Linear(config.ffn_dim, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.is_gated:
            gate, value = hidden.chunk(2, -1)
            hidden = F.silu(gate) * value
        else:
            hidden = gelu(hidden)
        out: Tensor = self.down(hidden)
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.norm1 = make_norm(config)
        self.attention = Attention(config, layer)
        self.norm2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        step: Step,
        rotation: Rotation | None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """(B, C, E) -> (B, C, E); or (N, E) of the tokens ``wanted``, as `GPT.hidden` has them,
        for which alone the MLP is computed."""
        x = x + self.attention(self.norm1(x), step, rotation)
        if wanted is not None:
            x = x.flatten(0, 1)[wanted]
        out: Tensor = x + self.mlp(self.norm2(x))
        return out
