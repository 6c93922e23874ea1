"""A layer of gated DeltaNet (arXiv 2412.06464), as `kvlab.model.attention.TokenMixer`.

Shapes: B rows, C tokens of a pass, H states, R query heads of each, D head_dim, E n_embd.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.cache import AttentionPass
from kvlab.extensions.linear_attention.delta_rule import mix_chunks, mix_token
from kvlab.model.attention import InputDtypeNorm, TokenMixer
from kvlab.model.kernels.linear import Linear
from kvlab.model.rope import PassRotation
from kvlab.spec.model_config import ModelConfig


def normalize(x: Tensor) -> Tensor:
    """Return x (..., D) at length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class GatedDelta(TokenMixer):
    """Tokens are folded into states by the gated delta rule, and queries read these.

    q, k and v are projected and pass a SiLU; q and k are then of length 1. The rate of a token is
    ``sigmoid(beta(x))``, the log of its decay ``-exp(log_scale) softplus(alpha(x) + offset)``. What
    a head reads is normalized (RMS) and multiplied by a SiLU of ``gate(x)`` before the output
    projection. The paper's convolutions over four tokens are left out: order enters by the
    recurrence, and by learned positions if there are any.

    The recurrence is in float32 at least, whatever the precision of the pass.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, own = layer, config.layers[layer]
        self.states, self.head_dim = own.n_kv_head, own.head_dim
        linear = partial(Linear, config.n_embd, bias=config.bias)
        self.q, self.gate = linear(own.out_width), linear(own.out_width)
        self.k, self.v = (linear(self.states * self.head_dim) for _ in range(2))
        self.alpha, self.beta = (
            nn.Linear(config.n_embd, self.states, bias=False) for _ in range(2)
        )
        # memories of about 1 to 1,000 tokens, by the range of the scales and of the steps that
        # Mamba-2 draws at random (arXiv 2405.21060)
        place = (torch.arange(self.states) + 0.5) / self.states
        self.log_scale = nn.Parameter(torch.log(1 + 15 * place))
        step = 0.001 * 100**place
        self.offset = nn.Parameter(torch.log(torch.expm1(step)))  # softplus gives the step
        self.norm = InputDtypeNorm(self.head_dim, eps=config.norm_eps)
        self.proj = Linear(own.out_width, config.n_embd, bias=config.bias)

    def forward(
        self,
        x: Tensor,
        attention_pass: AttentionPass,
        rotation: PassRotation | None,  # noqa: ARG002
    ) -> Tensor:
        batch, length, _ = x.shape
        heads = (batch, length, self.states, -1, self.head_dim)
        q, k, v = (F.silu(project(x)).view(heads) for project in (self.q, self.k, self.v))
        alpha, beta, gate = self.alpha(x), self.beta(x), self.gate(x)
        context = attention_pass.read_kv(self.layer)
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(q.dtype, torch.float32)
            q, k, v = (part.to(dtype).permute(0, 2, 3, 1, 4) for part in (q, k, v))
            log_decay = -self.log_scale.to(dtype).exp() * F.softplus(alpha.to(dtype) + self.offset)
            rate = beta.to(dtype).sigmoid()
            if context.is_real is not None:  # padding changes no state
                log_decay, rate = (w * context.is_real[..., None] for w in (log_decay, rate))
            tokens = (normalize(q) * self.head_dim**-0.5, normalize(k)[:, :, 0], v[:, :, 0],
                      log_decay.transpose(1, 2), rate.transpose(1, 2))  # fmt: skip
            past = context.parts[0] if context.parts else None
            assert past is None or isinstance(past, Tensor), "a state is no code"
            if past is not None and length == 1:
                y, state = mix_token(*tokens, past)
            else:
                ids = None if context.documents is None else context.documents.ids
                y, state = mix_chunks(*tokens, past, ids)
            if past is not None:
                attention_pass.write_kv(self.layer, state)
            y = self.norm(y.permute(0, 3, 1, 2, 4).to(self.norm.weight.dtype))
        attention_pass.end_layer(self.layer)
        y = y.reshape(batch, length, -1).to(gate.dtype) * F.silu(gate)
        out: Tensor = self.proj(y)
        return out
