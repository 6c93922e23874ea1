"""An independent, slow reference of the model and its cache, in dense float64.

It implements the rules of `kvlab.cache.attention_pass` and shares no code with the package: no
rings, no buffers, no torch attention. Every slot remembers every token, and a window is a mask.
torch is used only to round to the dtypes that numpy lacks.

    overwrite  in a pass, a layer sees its trained owner's K/V for the tokens of this pass, and
               for older tokens what the slot's last writing layer left
    owner      a layer sees the K/V of its slot's first layer, for all tokens

What a token stores is remembered as it is stored, in parts. K and V of each query head are made
from the parts of all tokens, anew for every query, as the definitions in the papers have them.
"""

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch

Array = np.ndarray


@dataclass
class ReferenceModel:
    """One row of text through one model.

    ``weights`` are float64 arrays by parameter name.
    """

    config: object
    weights: dict[str, Array]
    slots: list[int]
    rule: str = "overwrite"
    kv_dtype: object = "model"
    kv_group: int | None = None
    kv_residual: int | None = None
    evict: object = None
    kv_rotate: str = "none"
    past: dict[int, tuple[Array, ...]] = field(default_factory=dict)
    length: int = 0
    received: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)
    """By layer and K/V head: the attention that each kept token has received."""
    votes: dict[tuple[int, int], Array] = field(default_factory=dict)
    """The same: the scores that tokens of a prompt have from its last ones."""

    def logits(self, tokens: list[int]) -> Array:
        """Run one pass over the next tokens; return (tokens, vocabulary)."""
        c, w = self.config, self.weights
        positions = np.arange(self.length, self.length + len(tokens))
        x = w["token_embedding.weight"][tokens] * c.embedding_scale
        if c.position == "learned":
            x = x + w["position_embedding.weight"][positions]
        current: dict[int, tuple[Array, ...]] = {}
        for layer in range(c.n_layer):
            name = f"blocks.{layer}."
            normed = self.norm(x, name + "norm1")
            x = x + self.post_norm(self.attention(layer, normed, positions, current), name, 1)
            mixed = self.mlp(self.norm(x, name + "norm2"), name + "mlp.")
            x = x + self.post_norm(mixed, name, 2)
        for slot, parts in current.items():
            self.past[slot] = self.with_past(slot, parts)
        self.length += len(tokens)
        head = "token_embedding.weight" if c.tie_embeddings else "lm_head.weight"
        return self.norm(x, "norm") @ w[head].T

    def attention(self, layer: int, x: Array, positions: Array, current: dict) -> Array:
        c, slot, name = self.config, self.slots[layer], f"blocks.{layer}.attention."
        weight, bias = self.weights[name + "qkv.weight"], self.weights.get(name + "qkv.bias", 0.0)
        rows = x @ weight.T + bias
        latent = c.kv if hasattr(c.kv, "latent") else None
        head_dim, window = self.setting(layer, "head_dim"), self.setting(layer, "window")
        key_dim = head_dim + (latent.rotary if latent else 0)
        width = (latent.query if latent else None) or c.n_head * key_dim
        q = rows[:, :width]
        if latent and latent.query:
            q = (self.root_norm(q) * self.weights[name + "q_norm.weight"]) @ self.weights[
                name + "q_up.weight"
            ].T
        q = self.head_norm(q.reshape(len(x), c.n_head, key_dim), name + "query_norm.weight")
        q = self.rotate(layer, q, positions)
        owns = rows.shape[1] > width
        if owns and (self.rule == "overwrite" or slot == layer):
            parts = self.stored_parts(layer, rows[:, width:], positions)
            current[slot] = tuple(
                self.change_basis(round_to_format(self.change_basis(part), dtype, self.kv_group))
                for dtype, part in zip(self.dtypes(), parts, strict=False)
            )
        k, v = self.keys_values(layer, self.with_past(slot, current[slot]))
        all_k, all_v = k, v
        blocks = self.round_blocks(k, v)
        out = np.zeros((len(x), c.n_head, head_dim))
        sink = self.weights.get(name + "sink", np.full(c.n_head, -np.inf))
        for i, position in enumerate(positions):
            first = 0 if window is None else max(0, position - window + 1)
            seen = [t for t in range(position + 1) if t >= first or t < c.sink_tokens]
            if blocks is not None:
                k, v = self.see_blocks(position, (all_k, all_v), blocks)
            queries = c.n_head // self.setting(layer, "n_kv_head")
            for head in range(c.n_head):
                group = head // queries
                if self.evict is not None and window is None:
                    is_first = head % queries == 0
                    seen = self.keep_tokens(layer, group, position, is_first)
                score = k[seen, head] @ q[i, head] * (c.attention_scale or key_dim**-0.5)
                largest = max(score.max(), sink[head])
                probabilities = np.exp(score - largest)
                probabilities /= probabilities.sum() + np.exp(sink[head] - largest)
                out[i, head] = probabilities @ v[seen, head]
                if (layer, group) in self.received:
                    for token, share in zip(seen, probabilities, strict=True):
                        self.received[layer, group][token] += share
                elif self.evict is not None and self.evict.prompt and window is None:
                    shares = dict(zip(seen, probabilities, strict=True))
                    self.vote(layer, group, position, shares, head % queries == 0)
        if c.kv == "rotated_tied":
            out = self.rotate_back(layer, out, positions)
        bias = self.weights.get(name + "proj.bias", 0.0)
        return out.reshape(len(x), -1) @ self.weights[name + "proj.weight"].T + bias

    def with_past(self, slot: int, parts: tuple[Array, ...]) -> tuple[Array, ...]:
        past = self.past.get(slot)
        return parts if past is None else tuple(map(np.concatenate, zip(past, parts, strict=True)))

    def stored_parts(self, layer: int, rows: Array, positions: Array) -> tuple[Array, ...]:
        """Return what tokens store, each (tokens, vectors, numbers)."""
        c, name = self.config, f"blocks.{layer}.attention."
        kv_heads, count = self.setting(layer, "n_kv_head"), len(rows)
        heads = kv_heads * self.setting(layer, "head_dim")
        if c.kv == "separate":
            k = rows[:, :heads].reshape(count, kv_heads, -1)
            k = self.rotate(layer, self.head_norm(k, name + "key_norm.weight"), positions)
            return k, rows[:, heads:].reshape(count, kv_heads, -1)
        if c.kv == "tied":
            return (rows.reshape(count, kv_heads, -1),)
        if c.kv == "rotated_tied":
            return (self.rotate(layer, rows.reshape(count, kv_heads, -1), positions),)
        if c.kv == "grouped_tied":
            rotary_key = self.rotate(layer, rows[:, None, heads:], positions)
            return rows[:, :heads].reshape(count, kv_heads, -1), rotary_key
        latents = rows[:, : c.kv.groups * c.kv.latent].reshape(count, c.kv.groups, -1)
        latents = self.root_norm(latents) * self.weights[name + "kv.norm.weight"]
        rotary_key = rows[:, None, c.kv.groups * c.kv.latent :]
        return (latents, self.rotate(layer, rotary_key, positions)) if c.kv.rotary else (latents,)

    def keys_values(self, layer: int, parts: tuple[Array, ...]) -> tuple[Array, Array]:
        """Return K and V of every query head, (tokens, heads, numbers), from what is stored."""
        c, count = self.config, len(parts[0])
        name, head_dim = f"blocks.{layer}.attention.", self.setting(layer, "head_dim")
        if isinstance(c.kv, str):
            parts = tuple(np.repeat(part, c.n_head // part.shape[1], axis=1) for part in parts)
        if c.kv == "separate":
            return parts
        if c.kv == "tied":
            return self.rotate(layer, parts[0], np.arange(count)), parts[0]
        if c.kv == "rotated_tied":
            return parts[0], parts[0]
        if c.kv == "grouped_tied":
            return np.concatenate([parts[1], parts[0][..., : head_dim // 2]], -1), parts[0]
        group = c.n_head // c.kv.groups  # heads of one latent
        up = self.weights[name + "kv.up.weight"].reshape(c.kv.groups, 2, group, head_dim, -1)
        k, v = np.zeros((2, count, c.n_head, head_dim))
        for head in range(c.n_head):
            latent = parts[0][:, head // group]
            k[:, head] = latent @ up[head // group, 0, head % group].T
            v[:, head] = latent @ up[head // group, 1, head % group].T
        if c.kv.rotary:
            k = np.concatenate([np.repeat(parts[1], c.n_head, axis=1), k], -1)
        return k, v

    def keep_tokens(self, layer: int, group: int, position: int, is_first: bool) -> list[int]:
        """Return the tokens that the query at ``position`` sees; its own is one of ``keep``."""
        keep, newest = self.count_kept(layer), range(position + 1)
        if self.evict.by == "recency":
            sinks = 4 if self.evict.sinks is None else self.evict.sinks
            return [t for t in newest if t < sinks or position - t < keep - sinks]
        if self.evict.prompt:
            dropped = self.keep_prompt(layer, group) if position >= self.evict.prompt else []
            return [t for t in newest if t not in dropped]
        received = self.received.setdefault((layer, group), {})
        recent, sinks = self.evict.recent or max(1, self.evict.keep // 2), self.evict.sinks or 0
        if is_first:
            received[position] = 0.0
            is_new = str(self.evict.by) == "last_attention"  # of docs/extend: it forgets
            if len(received) > keep:
                others = [t for t in received if sinks <= t <= position - recent]
                del received[min(others, key=lambda t: (received[t], t))]
            received.update(dict.fromkeys(received, 0.0) if is_new else {})
        return sorted(received)

    def count_kept(self, layer: int) -> int:
        """Return how many tokens a layer keeps: the places beside those that always stay are dealt
        out by shares from ``2 - top_share`` in the first global slot to ``top_share`` in the last,
        and rounded in their running sum."""
        rule = self.evict
        slots = [s for s in sorted({*self.slots}) if self.setting(s, "window") is None]
        if rule.top_share is None or len(slots) == 1:
            return rule.keep
        top, last = Fraction(str(rule.top_share)), len(slots) - 1
        shares = [2 - top + (2 * top - 2) * Fraction(i, last) for i in range(last + 1)]
        sinks = (4 if rule.by == "recency" else 0) if rule.sinks is None else rule.sinks
        recent = rule.recent or (32 if rule.prompt else max(1, rule.keep // 2))
        always = sinks + (0 if rule.by == "recency" else recent)
        place = slots.index(self.slots[layer])
        before, after = (round((rule.keep - always) * sum(shares[:n])) for n in (place, place + 1))
        return always + after - before

    def vote(
        self, layer: int, group: int, position: int, shares: dict[int, float], is_first: bool
    ) -> None:
        """Add what a query of the prompt's last tokens gives to each token of the prompt."""
        if self.evict.prompt - (self.evict.recent or 32) <= position < self.evict.prompt:
            votes = self.votes.setdefault((layer, group), np.zeros(self.evict.prompt))
            if is_first and str(self.evict.by) == "last_attention":
                votes[:] = 0.0
            for token, share in shares.items():
                votes[token] += share

    def keep_prompt(self, layer: int, group: int) -> list[int]:
        """Return the tokens of the prompt that later queries do not see."""
        rule = self.evict
        keep = self.count_kept(layer)
        if keep >= rule.prompt:
            return []
        recent = rule.recent or 32
        reach = (rule.pool or (7 if rule.by == "snapkv" else 1)) // 2
        older = range(rule.prompt - recent)
        votes = self.votes[layer, group][: len(older)]
        near = {t: max(votes[max(0, t - reach) : t + reach + 1]) for t in older}
        first = set(range(rule.sinks or 0))
        ranked = sorted(older, key=lambda t: (t not in first, -np.float32(near[t]), t))
        return ranked[keep - recent :]

    def round_blocks(self, k: Array, v: Array) -> tuple[Array, Array] | None:
        """Return K and V (tokens, heads, head_dim) as KIVI gives them back, but for a rest."""
        if not self.dtypes()[0].startswith("kivi"):
            return None
        k, v, tokens = self.change_basis(k), self.change_basis(v), self.kv_group or 32
        size = min(tokens, k.shape[-1])
        levels, v_levels = (2 ** int(dtype[-1]) - 1 for dtype in self.dtypes())
        keys, values = [], []
        for start in range(0, len(k) - tokens + 1, tokens):
            block = np.moveaxis(k[start : start + tokens], 0, -1)  # (heads, head_dim, tokens)
            keys.append(np.moveaxis(_round_affine(block, levels), -1, 0))
        for row in v:
            parts = np.split(row, range(size, row.shape[-1], size), -1)
            values.append(np.concatenate([_round_affine(part, v_levels) for part in parts], -1))
        rounded = np.concatenate([*keys, k[len(keys) * tokens :]]), np.stack(values)
        return tuple(map(self.change_basis, rounded))

    def dtypes(self) -> tuple[str, str]:
        """Return how the first and the second part that a token stores are stored."""
        own = self.kv_dtype
        return (str(own.k), str(own.v)) if hasattr(own, "k") else (str(own), str(own))

    def change_basis(self, x: Array) -> Array:
        """Return vectors in the basis in which they are stored, or back."""
        return x if self.kv_rotate == "none" else x @ hadamard(x.shape[-1])

    def see_blocks(self, position: int, exact: tuple, rounded: tuple) -> list[Array]:
        """Return K and V as the query at ``position`` sees them."""
        tokens = self.kv_group or 32
        residual = 128 if self.kv_residual is None else self.kv_residual
        count = max(0, position + 1 - residual) // tokens * tokens
        return [
            np.concatenate([low[:count], full[count:]])
            for full, low in zip(exact, rounded, strict=True)
        ]

    def setting(self, layer: int, name: str) -> object:
        """Return what a layer's kind sets, or else the model."""
        c, letter = self.config, (self.config.attention_pattern * self.config.n_layer)[layer]
        kinds = {"G": c.global_, "L": c.local, **c.kinds}
        own = getattr(kinds[letter], name) if kinds[letter] is not None else None
        if own is None and (name != "window" or letter == "L"):
            own = getattr(c, name)
        return own

    def rotate(self, layer: int, x: Array, positions: Array) -> Array:
        """Rotate the leading dimensions that are rotary."""
        c, head_dim = self.config, self.setting(layer, "head_dim")
        if self.setting(layer, "position") != "rope":
            return x
        share = int(head_dim * self.setting(layer, "rotary_share") + 0.5)
        width = {
            "separate": share,
            "tied": share,
            "rotated_tied": share,
            "grouped_tied": head_dim // 2,
        }.get(c.kv if isinstance(c.kv, str) else "latent", getattr(c.kv, "rotary", 0))
        half = width // 2
        theta = self.setting(layer, "rope_theta") ** (-np.arange(half) * 2.0 / max(1, width))
        theta, length = self.scale_frequencies(layer, theta, width)
        angle = length * np.exp(1j * positions[:, None, None] * theta)
        rotated = (x[..., :half] + 1j * x[..., half:width]) * angle
        return np.concatenate([rotated.real, rotated.imag, x[..., width:]], -1)

    def rotate_back(self, layer: int, x: Array, positions: Array) -> Array:
        """Undo `rotate`, which a scaling may have made longer: solve for what it rotates to x."""
        pairs = np.eye(x.shape[-1])[None].repeat(len(x), 0)  # the rotation as a matrix
        matrices = self.rotate(layer, pairs, positions)  # rows are rotated unit vectors
        return np.linalg.solve(matrices.transpose(0, 2, 1), x.transpose(0, 2, 1)).transpose(0, 2, 1)

    def scale_frequencies(self, layer: int, theta: Array, width: int) -> tuple[Array, float]:
        """Return frequencies for a longer context, pair by pair, and the length of rotations."""
        scaling = self.setting(layer, "rope_scaling")
        if scaling is None:
            return theta, 1.0
        if scaling.by == "linear":
            return theta / scaling.factor, 1.0
        base, limits = self.setting(layer, "rope_theta"), []
        for turns in (scaling.beta_fast, scaling.beta_slow):  # the pair that turns as often
            wavelength = scaling.original / turns
            limits.append(width / 2 * np.log(wavelength / (2 * np.pi)) / np.log(base))
        if scaling.truncate:
            limits = [np.floor(limits[0]), np.ceil(limits[1])]
        low, high = max(0.0, limits[0]), min(width - 1.0, limits[1])
        if low == high:
            high += 0.001
        ramp = [min(1.0, max(0.0, (pair - low) / (high - low))) for pair in range(len(theta))]
        scaled = [t * (1 - r) + t / scaling.factor * r for t, r in zip(theta, ramp, strict=True)]
        return np.array(scaled), 1.0 + 0.1 * np.log(scaling.factor)

    def head_norm(self, x: Array, name: str) -> Array:
        """Normalize heads (tokens, heads, head_dim), if the model has this norm."""
        return self.root_norm(x) * self.weights[name] if name in self.weights else x

    def root_norm(self, x: Array) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.norm_eps)

    def post_norm(self, x: Array, name: str, number: int) -> Array:
        """Normalize what attention or MLP return, if the model has this norm."""
        is_sandwich = self.config.norm_placement == "sandwich"
        return self.norm(x, f"{name}post_norm{number}") if is_sandwich else x

    def norm(self, x: Array, name: str) -> Array:
        if self.config.norm == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        return self.root_norm(x) * self.weights[name + ".weight"] + self.weights.get(
            name + ".bias", 0.0
        )

    def mlp(self, x: Array, name: str) -> Array:
        x = x @ self.weights[name + "up.weight"].T + self.weights.get(name + "up.bias", 0.0)
        gate = x
        if self.config.mlp != "gelu":
            gate, x = np.split(x, 2, -1)
        if self.config.mlp in ("gelu", "geglu"):
            smooth = 0.5 * gate
            smooth = smooth * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        else:
            smooth = gate / (1 + np.exp(-gate))
        x = smooth if self.config.mlp == "gelu" else smooth * x
        return x @ self.weights[name + "down.weight"].T + self.weights.get(name + "down.bias", 0.0)


def hadamard(size: int) -> Array:
    """Return Sylvester's matrix in blocks, of which each number is a sign over a root."""
    block = max(2**n for n in range(10) if size % 2**n == 0)
    places = range(size)
    signs = [[(-1) ** (i % block & j % block).bit_count() for i in places] for j in places]
    is_block = [[i // block == j // block for i in places] for j in places]
    return np.array(signs) * np.array(is_block) / np.sqrt(block)


def round_to_format(x: Array, kv_dtype: str, group: int | None = None) -> Array:
    """Return ``x`` (tokens, heads, head_dim) as the cache gives it back from ``kv_dtype``."""
    if kv_dtype == "ternary":  # of docs/extend
        scale = np.abs(x.astype(np.float32)).mean(-1, keepdims=True, dtype=np.float64)
        scale = np.clip(scale.astype(np.float32), 1e-6, 6e4).astype(np.float16).astype(np.float64)
        return np.sign(x) * (np.abs(x) > scale / 2) * scale
    if kv_dtype in ("model", "float64", "kivi2", "kivi4"):
        return x
    single = torch.from_numpy(x).float()
    if kv_dtype in ("float32", "float16", "bfloat16"):
        return torch.from_numpy(x).to(getattr(torch, kv_dtype)).double().numpy()
    size = x.shape[-1]
    group = min(size, group or (32 if kv_dtype == "int4" else size))
    parts = [_round_group(part, kv_dtype) for part in single.split(group, -1)]
    return torch.cat(parts, -1).numpy()


def _round_group(single: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """Round vectors (..., group) that have one scale each."""
    max_code = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}[kv_dtype]
    scale = (single.abs().amax(-1, keepdim=True) / max_code).clamp(2.0**-24, 65504.0).half()
    codes = (single / scale.float()).clamp(-max_code, max_code)
    codes = codes.to(torch.float8_e4m3fn).float() if kv_dtype == "fp8" else codes.round()
    return codes.double() * scale.double()


def _round_affine(x: Array, levels: int) -> Array:
    """Round groups (..., numbers) that have one scale and one minimum each."""
    x = x.astype(np.float32)
    low = x.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
    scale = (x.max(-1, keepdims=True) - low) / np.float32(levels)
    scale = np.clip(scale, 2.0**-24, 65504.0).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint((x - low) / scale), 0, levels)
    return codes.astype(np.float64) * scale + low


def read_weights(model: torch.nn.Module) -> dict[str, Array]:
    """Return a model's parameters as float64 arrays."""
    return {name: p.detach().double().numpy() for name, p in model.named_parameters()}
