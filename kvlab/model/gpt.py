"""One transformer layer: pre-norm attention and MLP, each on the residual stream."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.cache import AttentionPass, DocumentMask, KVCache, OneShotPass
from kvlab.hf_checkpoints import resolve_checkpoint_folder
from kvlab.layout import KVLayout
from kvlab.model.attention import Attention
from kvlab.model.kernels.gelu import gelu
from kvlab.model.kernels.linear import Linear
from kvlab.model.positions import RopeTable, rope_table
from kvlab.model.pretrained import load_weights, read_config, save_pretrained
from kvlab.spec import ServingConfig
from kvlab.spec.model_config import ModelConfig


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
        step: AttentionPass,
        rotation: RopeTable | None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """(B, C, E) -> (B, C, E); or (N, E) of the tokens ``wanted``, as `GPT.hidden` has them,
        for which alone the MLP is computed."""
        x = x + self.attention(self.norm1(x), step, rotation)
        if wanted is not None:
            x = x.flatten(0, 1)[wanted]
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


# The transformer: one class for every combination of heads, positions, horizons and sharing.
#
# B rows, C tokens of a pass, E n_embd, V vocab_size.


class GPT(nn.Module):
    """A GPT-2-class language model.

    Args:
        config: its shape.
        seed: parameters are drawn for each by its name and this seed, so that two models of
            one seed start equal wherever their parameters have the same name and shape.
        device, dtype: where and in what the parameters live; default torch's.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int = 0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.config = config
        with torch.device(device or torch.get_default_device()):
            self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
            self.position_embedding = (
                nn.Embedding(config.block_size, config.n_embd)
                if config.position_scheme.has_embedding
                else None
            )
            self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
            self.norm = make_norm(config)
            self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.token_embedding.weight
        if self.device.type != "meta":
            self.reset_parameters(seed)
        if dtype is not None:
            self.to(dtype)

    @property
    def device(self) -> torch.device:
        return self.token_embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.token_embedding.weight.dtype

    def reset_parameters(self, seed: int) -> None:
        """GPT-2's initialisation: normal, 0.02; projections into the residual stream divided by
        sqrt(2 n_layer); biases zero, norms one."""
        residual = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.constant_(parameter, 1.0 if _is_norm_weight(name) else 0.0)
                continue
            std = residual if name.endswith(("proj.weight", "down.weight")) else 0.02
            for part, rows in self._parts(name, parameter):
                _init_normal(rows, std, seed, part)

    def _parts(self, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Named row ranges: q, k and v draw apart, so that q starts equal for MHA and MQA."""
        if not name.endswith("qkv.weight"):
            yield name, parameter
            return
        attention = self.get_submodule(name.removesuffix(".qkv.weight"))
        assert isinstance(attention, Attention)
        widths = [attention.q_width, attention.kv_width, attention.kv_width]
        for part, rows in zip("qkv", torch.split(parameter, widths), strict=True):
            yield f"{name}.{part}", rows

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> Tensor:
        """Logits (B, C, V) of ``tokens`` (B, C); see `hidden`."""
        return self.head(self.hidden(tokens, cache, lengths))

    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        document_start: int | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """The residual stream (B, C, E) after the final norm.

        Args:
            tokens: (B, C) of int64.
            cache: continue from it, and keep these tokens' K/V in it.
            lengths: (B,) with a cache: how many tokens of each row are real, where the rest of
                the row is padding. Rows may then hold different numbers of tokens.
            document_start: without a cache: the token that begins a document; each document is
                then computed as if it stood alone. See `kvlab.cache.document_mask`.
            wanted: (N,) of int64: the tokens, counted over all rows, whose stream is of use; the
                result is theirs, (N, E). The last layer's MLP and the norm leave out the others,
                of which later tokens need no more than K and V.

        Raises:
            CacheError: the tokens do not fit the cache.
            ValueError: a position is beyond the learned embeddings, lengths without a cache, or
                documents with one.
        """
        count = tokens.shape[1]
        if cache is None:
            if lengths is not None:
                raise ValueError("lengths needs a cache; without one, padding at the end is inert")
            documents = None if document_start is None else DocumentMask(tokens, document_start)
            step: AttentionPass = OneShotPass(
                self.config.kv_owners, count, tokens.device, documents
            )
        elif document_start is not None:
            raise ValueError("a cache's row holds one document; give each document its own row")
        else:
            step = cache.step(count, lengths)
        self._check_positions(step.end)
        return self.run(tokens, step, wanted)

    def run(self, tokens: Tensor, step: AttentionPass, wanted: Tensor | None = None) -> Tensor:
        """`hidden` over a step that is already made and checked; see `kvlab.cache.attention_pass`."""
        x = self.token_embedding(tokens)
        turn: RopeTable | None = None
        if self.position_embedding is not None:
            # only padding can stand beyond the end; its outputs mean nothing
            inside = step.positions.clamp_max(self.config.block_size - 1)
            x = x + self.position_embedding(inside)
        elif self.config.position_scheme.is_rotary:
            turn = rope_table(step.positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        *before, last = self.blocks
        for block in before:
            x = block(x, step, turn)
        x = last(x, step, turn, wanted)
        step.finish()
        out: Tensor = self.norm(x)
        return out

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of the residual stream (..., E)."""
        out: Tensor = self.lm_head(hidden)
        return out

    def _check_positions(self, end: int) -> None:
        limit = self.config.block_size
        if self.position_embedding is not None and end > limit:
            raise ValueError(
                f"{end} tokens exceed block_size = {limit}, the end of the learned positions;"
                " shorten the text, or use position: rope"
            )

    def new_cache(
        self,
        batch_size: int,
        max_length: int,
        serving: ServingConfig | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """An empty cache for ``batch_size`` rows of up to ``max_length`` tokens.

        Args:
            serving: how it is stored and tied; default as trained, in the model's dtype.
            dtype: the dtype in which K and V are computed; default the parameters'.
        """
        layout = KVLayout.of(self.config, serving)
        return KVCache(layout, batch_size, max_length, dtype or self.dtype, self.device)

    def decay_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters that weight decay applies to (matrices), and the others."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        return matrices, [p for p in self.parameters() if p.dim() < 2]

    @classmethod
    def from_pretrained(cls, path_or_repo: str | Path, **model_changes: Any) -> "GPT":
        """A published checkpoint of type gpt2, llama or mistral.

        Args:
            path_or_repo: a folder with ``config.json`` and ``*.safetensors``, or a repository.
            model_changes: fields of the configuration that need no other weights, such as
                ``window`` with ``attention_pattern``.

        Raises:
            PretrainedError: it cannot be had, or names or shapes do not match; all listed.
        """
        folder = resolve_checkpoint_folder(path_or_repo)
        architecture, config = read_config(folder)
        if model_changes:
            config = ModelConfig(**{**config.model_dump(), **model_changes})
        model = cls(config, device="meta").to_empty(device="cpu")
        if config.tie_embeddings:
            model.lm_head.weight = model.token_embedding.weight
        load_weights(model, folder, architecture)
        return model

    def save_pretrained(self, folder: str | Path) -> str:
        """Writes a Hugging Face folder; see `kvlab.model.pretrained.save_pretrained`."""
        return save_pretrained(self, folder)

    @classmethod
    def meta(cls, config: ModelConfig) -> "GPT":
        """The model without memory: shapes and names only."""
        return cls(config, device="meta")

    def extra_repr(self) -> str:
        owners = len(set(self.config.kv_owners))
        return f"{sum(p.numel() for p in self.parameters()):,} parameters, {owners} K/V owners"


def _is_norm_weight(name: str) -> bool:
    return name.endswith(("norm.weight", "norm1.weight", "norm2.weight"))


def _init_normal(parameter: Tensor, std: float, seed: int, name: str) -> None:
    digest = hashlib.sha256(f"{seed}:{name}:{tuple(parameter.shape)}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
    drawn = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
    with torch.no_grad():
        parameter.copy_(drawn)
