"""The transformer: one class for every combination of heads, positions, windows and sharing.

Shapes: B rows, C tokens of a pass, N selected tokens, E n_embd, V vocab_size.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.cache import AttentionPass, DocumentMask, KVCache, begin_one_shot_pass
from kvlab.cache.kv_cache import Lengths
from kvlab.cache.last_token_pass import LastTokenPass, count_writing_layers
from kvlab.cache.uncached_passes import KVReads
from kvlab.layout import KVLayout
from kvlab.model.attention import Attention, TokenMixer
from kvlab.model.kernels.gelu import gelu
from kvlab.model.kernels.linear import Linear, LinearProducts
from kvlab.model.rope import PassRotation, RopeTable, RotaryTables
from kvlab.spec import ServingConfig
from kvlab.spec.checkpoint_tools import find_checkpoint_tool
from kvlab.spec.dtypes import KVStorage
from kvlab.spec.flops import parameter_count
from kvlab.spec.model_config import ModelConfig


def make_norm(config: ModelConfig) -> nn.Module:
    """Return the norm of the residual stream."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


class RMSNorm(nn.RMSNorm):
    """An RMS norm in the dtype of its weight, for a residual stream of any dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class MLP(nn.Module):
    """GPT-2's MLP with the tanh GELU, or a gated one (arXiv 2002.05202).

    ``up`` of a gated MLP stacks the rows of the gate, then those of the value.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.activate: Callable[[Tensor], Tensor] = F.silu if config.mlp == "swiglu" else gelu
        self.is_gated = config.mlp != "gelu"
        inner = config.ffn_dim * (config.mlp_matrices - 1)
        self.up = Linear(config.n_embd, inner, bias=config.bias)
        self.down = Linear(config.ffn_dim, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.is_gated:
            gate, value = x.chunk(2, -1)
            x = self.activate(gate) * value
        else:
            x = self.activate(x)
        out: Tensor = self.down(x)
        return out


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + MLP(norm(x)). ``attention`` is its mixer.

    With ``norm_placement: sandwich`` the outputs of attention and MLP are normalized, too.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.norm1 = make_norm(config)
        mixer = config.layers[layer].mixer
        self.attention: TokenMixer = mixer.load(mixer.module)(config, layer)
        self.norm2 = make_norm(config)
        self.mlp = MLP(config)
        is_sandwich = config.norm_placement == "sandwich"
        self.post_norm1 = make_norm(config) if is_sandwich else None
        self.post_norm2 = make_norm(config) if is_sandwich else None

    def forward(
        self,
        x: Tensor,
        attention_pass: AttentionPass,
        rotation: PassRotation | None,
        indices: Tensor | None,
    ) -> Tensor:
        """Apply the layer to x (B, C, E).

        Returns:
            (B, C, E). With ``indices`` (N,), (N, E): the MLP runs on these tokens alone.
        """
        attended = self.attention(self.norm1(x), attention_pass, rotation)
        x = x + (attended if self.post_norm1 is None else self.post_norm1(attended))
        if indices is not None:
            x = x.flatten(0, 1)[indices]
        computed = self.mlp(self.norm2(x))
        out: Tensor = x + (computed if self.post_norm2 is None else self.post_norm2(computed))
        return out


class GPT(nn.Module):
    """A GPT-2-class language model.

    Args:
        seed: of the initial parameters. Each is drawn by its name and the seed, so two models of
            one seed start equal wherever parameters have the same name and shape.
        device, dtype: of the parameters; default torch's.

    Attributes:
        trained_kv: how passes without a cache round K and V (`training.kv_dtype`); by default
            they do not.
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
        self.trained_kv = KVStorage()
        rotations = dict.fromkeys(layer.rotation for layer in config.layers if layer.rotary_dim)
        self.rotary_tables = [RotaryTables(*rotation) for rotation in rotations]
        # by number: the compiler cannot hash a scaling
        numbers = {rotation: number for number, rotation in enumerate(rotations)}
        self._layer_rotations = [numbers.get(layer.rotation) for layer in config.layers]
        with torch.device(device or torch.get_default_device()):
            self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
            self.position_embedding = (
                nn.Embedding(config.block_size, config.n_embd)
                if config.position_scheme.has_embedding
                else None
            )
            self.blocks = nn.ModuleList()
            for layer in range(config.n_layer):
                with torch.random.fork_rng(devices=[]):  # what a user's module draws by itself
                    torch.manual_seed(_derive_seed(seed, f"blocks.{layer}"))
                    self.blocks.append(Block(config, layer))
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

    @property
    def dtype_name(self) -> str:
        """The dtype as specs name it, such as ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def has_single_tokens(self) -> bool:
        """Whether what passes without a cache read of a token depends on that token alone, so that
        several continuations of a text may stand in one row."""
        plans = KVLayout.of_training(self.config, self.trained_kv).plans
        return all(plan.has_single_tokens for plan in plans)

    def forward(
        self, tokens: Tensor, cache: KVCache | None = None, lengths: Lengths | None = None
    ) -> Tensor:
        """Return the logits (B, C, V) of ``tokens`` (B, C); see `hidden_states`."""
        return self.compute_logits(self.hidden_states(tokens, cache, lengths))

    def hidden_states(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        lengths: Lengths | None = None,
        document_start: int | None = None,
        token_indices: Tensor | None = None,
        residual_dtype: torch.dtype | None = None,
        reads: KVReads | None = None,
        are_last: bool = False,
    ) -> Tensor:
        """Return the residual stream after the final norm.

        Args:
            tokens: (B, C) of int64.
            cache: continue from it, and store these tokens' K/V in it.
            lengths: (B,) with a cache: how many tokens of each row are real; the rest is padding
                at the end. Rows may then hold different numbers of tokens.
            document_start: without a cache: the token that begins a document. Each document is
                then computed as if it stood alone; see `kvlab.cache.DocumentMask`.
            token_indices: (N,) of int64, indices into the flattened rows: return only these
                tokens. The last layer's MLP and the norm skip the others.
            residual_dtype: of the residual stream between layers; default the parameters'.
            reads: without a cache: whose K/V the layers read; by default their owners'.
            are_last: ``token_indices`` are those of each row's last real token, and without a cache
                there is no padding. Upper layers that write no K/V skip the other tokens.

        Returns:
            (B, C, E), or (N, E) with ``token_indices``.

        Raises:
            CacheError: the tokens do not fit the cache.
            ValueError: a position is beyond the learned embeddings, or there are lengths without a
                cache, or documents with one.
        """
        attention_pass: AttentionPass
        if cache is None:
            if lengths is not None:
                raise ValueError("lengths needs a cache; without one, padding at the end is inert")
            documents = None if document_start is None else DocumentMask(tokens, document_start)
            attention_pass = begin_one_shot_pass(
                self.config, self.trained_kv, tokens.shape[1], tokens.device, documents, reads
            )
        elif document_start is not None:
            raise ValueError("a cache's row holds one document; give each document its own row")
        else:
            attention_pass = cache.begin_pass(tokens.shape[1], lengths)
        remedy = "shorten the text, or use position: rope"
        self.config.check_positions(attention_pass.end, remedy)
        return self.run_pass(tokens, attention_pass, token_indices, residual_dtype, are_last)

    def run_pass(
        self,
        tokens: Tensor,
        attention_pass: AttentionPass,
        token_indices: Tensor | None = None,
        residual_dtype: torch.dtype | None = None,
        are_last: bool = False,
    ) -> Tensor:
        """Run ``tokens`` through all layers in a given pass; see `hidden_states`."""
        positions, limit = attention_pass.positions, attention_pass.position_limit
        x = self.token_embedding(tokens)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.position_embedding is not None:
            # only padding can be beyond the last position; its outputs are meaningless
            x = x + self.position_embedding(positions.clamp_max(self.config.block_size - 1))
        rotations = [
            PassRotation(tables, positions, limit, x.dtype) for tables in self.rotary_tables
        ]
        dtype, layers = x.dtype, self.config.n_layer
        x = x if residual_dtype is None else x.to(residual_dtype)
        skips = are_last and tokens.shape[1] > 1
        first_reader = count_writing_layers(attention_pass, layers) if skips else layers
        for number, (block, kind) in enumerate(
            zip(self.blocks, self._layer_rotations, strict=True)
        ):
            if number == first_reader:
                assert token_indices is not None
                x = x.flatten(0, 1)[token_indices][:, None]
                attention_pass = LastTokenPass(attention_pass, token_indices, self.config.layers)
                token_indices = torch.arange(len(x), device=x.device)
                rotations = [
                    PassRotation(tables, attention_pass.positions, limit, dtype)
                    for tables in self.rotary_tables
                ]
            rotation = None if kind is None else rotations[kind]
            x = block(x, attention_pass, rotation, token_indices if number == layers - 1 else None)
        attention_pass.finish()
        out: Tensor = self.norm(x)
        return out

    def prepare_positions(self, length: int) -> list[RopeTable]:
        """Make the rotary tables for ``length`` tokens now, before a pass is compiled or captured.

        Returns:
            The tables, which a captured pass must keep alive.
        """
        return [tables.prepare(length, self.device, self.dtype) for tables in self.rotary_tables]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits (..., V) of the final residual stream (..., E)."""
        logits: Tensor = self.lm_head(hidden_states)
        return logits

    @contextmanager
    def multiply_by(self, products: LinearProducts | None) -> Iterator[None]:
        """Compute the linear layers of attention and MLPs by ``products`` in the block."""
        layers = self.linear_layers().values() if products else ()
        try:
            for layer in layers:
                layer.products = products
            yield
        finally:
            for layer in layers:
                layer.products = None

    def linear_layers(self) -> dict[str, Linear]:
        """Return the linear layers of attention and MLPs by name, without the head."""
        modules = self.blocks.named_modules(prefix="blocks")
        return {name: module for name, module in modules if isinstance(module, Linear)}

    def new_cache(
        self,
        batch_size: int,
        max_length: int,
        serving: ServingConfig | None = None,
    ) -> KVCache:
        """Return an empty cache for ``batch_size`` rows of up to ``max_length`` tokens.

        Args:
            serving: how K/V are stored and tied; default untied, in the model's dtype.
        """
        return KVCache(
            KVLayout.of(self.config, serving),
            batch_size,
            max_length,
            self.dtype,
            self.device,
            compiles_steps=serving is not None and serving.compile,
        )

    def reset_parameters(self, seed: int) -> None:
        """Draw GPT-2's initial weights.

        Matrices are normal with a standard deviation of 0.02, divided by sqrt(2 n_layer) in
        projections into the residual stream. Biases are zero, norm weights one. The query, key
        and value rows of a ``qkv`` are drawn separately, so that MHA and MQA start from the same
        queries. A tensor that is both K and V starts as V. Parameters of a module that is neither a
        linear layer, an embedding nor a norm keep the values that the module gave them.
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            owner = self.get_submodule(name.rpartition(".")[0])
            if isinstance(owner, nn.RMSNorm | nn.LayerNorm):
                nn.init.constant_(parameter, 1.0 if name.endswith(".weight") else 0.0)
                continue
            if not isinstance(owner, nn.Linear | nn.Embedding):
                continue
            if parameter.dim() < 2:
                nn.init.zeros_(parameter)
                continue
            std = residual_std if name.endswith(("proj.weight", "down.weight")) else 0.02
            parts: dict[str, Tensor] = {name: parameter}
            attention = self.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
            if isinstance(attention, Attention) and name.endswith(".qkv.weight"):
                names = ("q", *attention.config.kv_form.parts)  # a latent may have no rotary key
                widths = attention.widths if attention.store_width else attention.widths[:1]
                rows = torch.split(parameter, widths)
                parts = {f"{name}.{part}": own for part, own in zip(names, rows, strict=False)}
            for part, own in parts.items():
                number = _derive_seed(seed, f"{part}:{tuple(own.shape)}")
                generator = torch.Generator().manual_seed(number)
                values = torch.empty(own.shape).normal_(0.0, std, generator=generator)
                with torch.no_grad():
                    own.copy_(values)

    @classmethod
    def from_pretrained(cls, path_or_repo: str | Path, **model_changes: Any) -> "GPT":
        """Return a published checkpoint's model; see `kvlab.extensions.published_weights`.

        Args:
            path_or_repo: a folder with ``config.json`` and ``*.safetensors``, or a repository of
                the Hugging Face hub.
            model_changes: fields of the configuration that need no other weights, such as
                ``window`` with ``attention_pattern``.

        Raises:
            PretrainedError: the checkpoint is unavailable, or names or shapes do not match; all
                mismatches are listed.
        """
        model: GPT = find_checkpoint_tool("load")(cls, path_or_repo, **model_changes)
        return model

    def save_pretrained(self, folder: str | Path, *, end_of_text: int | None = None) -> str:
        """Write a Hugging Face folder; return its ``model_type``.

        Args:
            end_of_text: the token id between documents, written as the id of their beginning and
                of their end; None writes that it is unknown.

        Raises:
            PretrainedError: no published architecture computes what this model does; the message
                says why for each of them.
        """
        kind: str = find_checkpoint_tool("save")(self, folder, end_of_text=end_of_text)
        return kind


def _derive_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % 2**63


def check_parameter_count(model: GPT) -> None:
    """Raise ValueError if a model has other parameters than its forms and mixers declare."""
    held = sum(parameter.numel() for parameter in model.parameters())
    declared = parameter_count(model.config)
    if held != declared:
        text = f"the model has {held:,} parameters, and {declared:,} are declared; correct"
        names = "up_weights and norm_weights of its form, or weights and vectors of its mixer"
        raise ValueError(f"{text} {names}")
