"""What every K/V form and mixer must do, as checks of one model: kvlab's own and those of users.

Each check takes a configuration and returns how far it is off, or raises `Broken`. `draw_case`
draws configurations; ``kvlab check`` runs the checks over many, the tests over chosen ones.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, get_args, get_origin

import torch
from torch import Tensor, nn

from kvlab.cache import KVCache
from kvlab.cache.formats import QuantizerFormat
from kvlab.layout import KVLayout
from kvlab.model.attention import Attention, SeparateKV, TokenMixer
from kvlab.model.decode_attention import Keys
from kvlab.model.generate import EagerDecoder, StaticDecoder
from kvlab.model.gpt import GPT, check_parameter_count
from kvlab.model.rope import RopeTable
from kvlab.own_extensions import find_members
from kvlab.spec.extension_files import locate_error
from kvlab.spec.kv_forms import KVForm
from kvlab.spec.members import Member, MemberError
from kvlab.spec.mixers import Mixer
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.quantizers import Quantizer
from kvlab.spec.serving_config import ServingConfig
from kvlab.spec.spec_model import SpecModel
from kvlab.spec.token_metrics import ScoredTokens, TokenMetric, select_scores

ROWS, TOKENS, VOCABULARY = 2, 20, 41
TOLERANCE = 1e-10
"""The largest difference of logits in float64, of models whose logits are about 1."""


class Broken(AssertionError):
    """A member does not do what it must."""


def draw_case(draw: random.Random, member: Member) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a small random model with a member, and of how it is served."""
    member = _draw_settings(draw, member)
    more = [{key: value} for key, value in find_members("checked_servings").items()]
    heads, head_dim = draw.choice((2, 4)), draw.choice((8, 16))
    layers = draw.choice((2, 3, 4))
    model: dict[str, Any] = {
        "vocab_size": VOCABULARY, "block_size": 64, "n_layer": layers, "n_head": heads,
        "n_kv_head": draw.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "n_embd": heads * head_dim, "position": draw.choice(("rope", "rope", "learned", "none")),
        "norm": draw.choice(("layernorm", "rmsnorm")), "bias": draw.random() < 0.5,
    }  # fmt: skip
    if isinstance(member, Mixer):
        pattern = draw.choice([p for p in ("M", "MG", "MML", "GM") if len(p) <= layers])
        model |= {"attention_pattern": pattern, "kinds": {"M": {"mixer": member}}}
        model |= {"window": 7} if "L" in pattern else {}
        return model, draw.choice([{}, {"kv_dtype": "int8"}, *more])
    if isinstance(member, KVForm):
        model["kv"] = member
    if draw.random() < 0.5:
        pattern = draw.choice([p for p in ("L", "GL", "GLL", "LG") if len(p) <= layers])
        model |= {"window": draw.choice((3, 7, 16)), "attention_pattern": pattern}
        model |= {"sink_tokens": draw.choice((0, 0, 2))}
    elif draw.random() < 0.4:
        model["kv_sharing"] = "adjacent:2"
    serving = draw.choice([{}, {}, {"kv_dtype": "int8"}, {"tie": "adjacent:2"}, *more])
    own = draw.choice(member.checked_servings)
    if isinstance(member, Quantizer) and draw.random() < 0.3:
        own = {"kv_dtype": draw.choice(({"k": member, "v": "int8"}, {"k": "int8", "v": member}))}
    return model, {**serving, **own}


def _draw_settings(draw: random.Random, member: Member) -> Member:
    """Return a member with settings drawn from what their types list; others keep defaults."""
    options, drawn = member.options, {}
    for name, field in type(options).model_fields.items() if options else ():
        kind = field.annotation
        values = get_args(kind) if get_origin(kind) is Literal else (False, True)
        if kind is bool or get_origin(kind) is Literal:
            drawn[name] = draw.choice(values)
    return member.with_options(drawn) if drawn else member


def make_model(config: ModelConfig, seed: int = 0, std: float = 0.3) -> GPT:
    """Return a model in float64 whose weights are so large that a wrong path through it shows."""
    model = GPT(config, seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed + 5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise * std)
    return model


def draw_tokens(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)


@torch.inference_mode()
def check_shapes(config: ModelConfig, _serving: ServingConfig) -> float:
    """A module gives tensors of the shapes that its layer takes; arithmetic gives numbers."""
    model, rows = make_model(config), (ROWS, TOKENS)
    for block, layer in zip(model.blocks, config.layers, strict=True):
        mixer = block.attention
        if not isinstance(mixer, TokenMixer):
            raise Broken(f"{type(mixer).__name__} is no TokenMixer; derive it from that class")
        layer.mixer.products(layer, TOKENS)
        layer.mixer.decode_flops(layer, TOKENS)
        layer.mixer.saved_bytes(layer, TOKENS, 4)
        _require_shapes(mixer, "forward", (), [(*rows, config.n_embd)])
        if isinstance(mixer, Attention):
            if not isinstance(mixer.kv, SeparateKV):
                raise Broken(f"{type(mixer.kv).__name__} is no SeparateKV; derive it from that")
            stored = [(ROWS, part.count, TOKENS, part.size) for part in layer.stored]
            _require_shapes(mixer.kv, "store", layer.kv_form.parts, stored)
            attended = (ROWS, layer.n_head, TOKENS, layer.head_dim)
            _require_shapes(mixer.kv, "attend", (), [attended])
            if layer.kv_form.stores_keys:
                _require_stored_keys(mixer.kv)
    return _require_equal(model(draw_tokens()), model(draw_tokens()))


def _require_equal(logits: Tensor, again: Tensor) -> float:
    """Refuse logits that a second pass over the text does not give again."""
    if not logits.isfinite().all():
        raise Broken("logits are not finite; something makes NaN or infinity")
    if not torch.equal(logits, again):
        raise Broken("two passes over one text differ; draw no random numbers, and keep no state")
    return 0.0


def _require_stored_keys(view: SeparateKV) -> None:
    """Let a view raise `Broken` if it attends to other keys than its first part."""
    method = view.attend

    def attend_checked(q: Tensor, parts: Any, rope: RopeTable | None, attend: Any) -> Tensor:
        def compare(q: Tensor, k: Keys, v: Any) -> Any:
            if not torch.equal(k.to_dense(q.dtype).nan_to_num(), parts[0].nan_to_num()):
                text = "attends to other keys than its first part, and its form says stores_keys"
                raise Broken(f"{type(view).__name__} {text}; leave that out")
            return attend(q, k, v)

        return method(q, parts, rope, compare)

    view.attend = attend_checked  # type: ignore[method-assign]


def _require_shapes(
    module: nn.Module, name: str, parts: tuple[str, ...], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Let a method of a module raise `Broken` if it returns tensors of other shapes.

    Args:
        parts: what the tensors of a tuple are; empty for one tensor.
    """
    method, own = getattr(module, name), type(module).__name__

    def checked(*arguments: Any) -> Any:
        try:
            value = method(*arguments)
        except Exception as error:
            if isinstance(error, Broken) or locate_error(error):
                raise
            raise Broken(f"{own}.{name} fails: {type(error).__name__}: {error}") from error
        tensors = value if parts and isinstance(value, tuple) else (value,)
        found = [tuple(getattr(one, "shape", [type(one).__name__])) for one in tensors]
        if found != shapes:
            of = f" for {parts!r}" if parts else ""
            raise Broken(f"{own}.{name} returns {found}, and its layer takes {shapes}{of}")
        return value

    setattr(module, name, checked)


@torch.inference_mode()
def check_distances(config: ModelConfig, _serving: ServingConfig) -> float:
    """Under rotary positions a text has the same logits wherever it begins."""
    if config.position != "rope":
        return 0.0
    model, tokens = make_model(config), draw_tokens()
    logits = model(tokens)
    for tables in model.rotary_tables:
        tables.at = partial(_rotate_later, tables.at)  # type: ignore[method-assign]
    difference = float((model(tokens) - logits).abs().max())
    text = "logits change with where a text begins; rotate each key once, as SeparateKV.store does"
    return _require_close(difference, f"{text}; they differ")


def _rotate_later(at: Callable[..., RopeTable], positions: Tensor, limit: int, *more: Any) -> Any:
    return at(positions + 9, limit + 9, *more)


@torch.inference_mode()
def check_cached_logits(config: ModelConfig, _serving: ServingConfig) -> float:
    """Logits in chunks, token by token and by static steps are those of one pass."""
    model, tokens = make_model(config), draw_tokens()
    one_shot = model(tokens)
    static, eager, chunked = (model.new_cache(ROWS, TOKENS) for _ in range(3))
    ways = {"in chunks": [model(part, cache=chunked) for part in tokens.tensor_split([7, 8], 1)]}
    decoders = {"token by token": (EagerDecoder, eager), "by static steps": (StaticDecoder, static)}
    if not static.has_static_pass:
        del decoders["by static steps"]
    for way, (decoder_class, cache) in decoders.items():
        first, decoder = model(tokens[:, :4], cache=cache), decoder_class(model, cache)
        steps = [decoder(token)[:, None].clone() for token in tokens[:, 4:].T]
        ways[way] = [first, *steps]
    return max(
        _require_close(
            float((torch.cat(logits, 1) - one_shot).abs().max()),
            f"logits {way} differ from those of one pass",
        )
        for way, logits in ways.items()
    )


def _require_close(difference: float, words: str) -> float:
    """Return a difference that rounding in float64 explains; NaN is none."""
    if not difference < TOLERANCE:
        hint = "; if that is rounding, compute sums and products in float64"
        raise Broken(f"{words} by {difference:.2g}{hint if difference < 1e-3 else ''}")
    return difference


@torch.inference_mode()
def check_rows(config: ModelConfig, _serving: ServingConfig) -> float:
    """Rows of several lengths in one pass are computed as if each were alone."""
    model = make_model(config)
    return _compare_rows(model, model.new_cache(ROWS, TOKENS), model)


@torch.inference_mode()
def check_served_rows(config: ModelConfig, serving: ServingConfig) -> float:
    """As `check_rows`, through a cache of this serving."""
    model = make_model(config)
    cache, cache_of_one = (model.new_cache(rows, TOKENS, serving) for rows in (ROWS, 1))

    def compute_alone(tokens: Tensor) -> Tensor:
        cache_of_one.reset()
        logits: Tensor = model(tokens, cache=cache_of_one)
        return logits

    return 0.0 if serving.tie != "none" else _compare_rows(model, cache, compute_alone)


def _compare_rows(model: GPT, cache: KVCache, compute_alone: Callable[[Tensor], Tensor]) -> float:
    """Return how much logits of rows of several lengths differ from those of each alone."""
    tokens, ends, largest = draw_tokens(), [0] * ROWS, 0.0
    for lengths in ([5, 2], [1, 1], [3, 7], [0, 1], [1, 0]):
        part = torch.zeros(ROWS, max(lengths), dtype=torch.int64)
        for row, new in enumerate(lengths):
            part[row, :new] = tokens[row, ends[row] : ends[row] + new]
        logits = model(part, cache=cache, lengths=lengths)
        for row, new in enumerate(lengths):
            ends[row] += new
            if new:
                alone = compute_alone(tokens[row : row + 1, : ends[row]])[0, -new:]
                largest = max(largest, float((logits[row, :new] - alone).abs().max()))
    return _require_close(largest, "logits of rows of several lengths differ from each alone")


@torch.inference_mode()
def check_documents(config: ModelConfig, _serving: ServingConfig) -> float:
    """Documents that are packed in a row are computed as if each were alone."""
    model, tokens, largest = make_model(config), draw_tokens(), 0.0
    start = VOCABULARY - 1
    tokens[tokens == start], begins = 0, (0, 3, 11)
    tokens[:, list(begins)] = start
    hidden = model.hidden_states(tokens, document_start=start)
    for begin, end in zip(begins, (*begins[1:], TOKENS), strict=True):
        alone = model.hidden_states(tokens[:, begin:end])
        largest = max(largest, float((hidden[:, begin:end] - alone).abs().max()))
    return _require_close(largest, "documents in a row differ from each alone")


@torch.inference_mode()
def check_cache(config: ModelConfig, serving: ServingConfig) -> float:
    """A cache takes the bytes that its layout says, and chunks of any length are the same."""
    model, tokens = make_model(config), draw_tokens()
    cache = model.new_cache(ROWS, TOKENS, serving)
    declared = KVLayout.of(config, serving).stored_bytes(ROWS, TOKENS, "float64")
    if cache.nbytes != declared:
        raise Broken(f"the cache takes {cache.nbytes:,} bytes, and {declared:,} are declared")
    steps = [model(tokens[:, i : i + 1], cache=cache) for i in range(TOKENS)]
    if serving.tie != "none":  # tied, a layer reads its own K/V of the tokens of one pass
        return 0.0
    cache.reset()
    chunks = [model(part, cache=cache) for part in tokens.tensor_split([7, 8], 1)]
    difference = float((torch.cat(steps, 1) - torch.cat(chunks, 1)).abs().max())
    return _require_close(difference, "logits of chunks and of single tokens differ")


def check_parameters(config: ModelConfig, _serving: ServingConfig) -> float:
    """The member says how many weights it has."""
    try:
        check_parameter_count(GPT(config, device="meta"))
    except ValueError as error:
        raise Broken(str(error)) from None
    return 0.0


def check_gradients(config: ModelConfig, _serving: ServingConfig) -> float:
    """Gradients reach every weight and are finite."""
    model = make_model(config)
    torch.autograd.backward(model(draw_tokens()).square().mean())
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        # a bias of keys has none where no position rotates: softmax does not see it
        rows = () if grad is None else grad.abs().flatten(1).amax(1) if grad.dim() > 1 else grad
        is_matrix = grad is not None and grad.dim() > 1 and ".attention." in name
        if not any(rows) or (is_matrix and not all(rows)):
            raise Broken(f"no gradient reaches {name}, or some of its rows")
        if grad is None or not grad.isfinite().all():
            raise Broken(f"the gradient of {name} is not finite")
    return 0.0


def check_training(config: ModelConfig, _serving: ServingConfig) -> float:
    """Thirty steps on one text lower its loss."""
    model, tokens = GPT(config, seed=0), draw_tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        logits = model(tokens)[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    if not losses[-1] < losses[0] - 0.5:
        text = f"from {losses[0]:.2f} to {losses[-1]:.2f} nats/token"
        raise Broken(f"thirty steps take the loss of one text {text}")
    return 0.0


@torch.inference_mode()
def check_vectors(config: ModelConfig, serving: ServingConfig) -> float:
    """A quantizer stores each vector by itself, and gives back finite vectors of its size."""
    dtypes = set(KVLayout.of(config, serving).plans[0].list_dtypes("float64"))
    generator = torch.Generator().manual_seed(0)
    for quantizer in (one for one in dtypes if isinstance(one, Quantizer)):
        storage, name = QuantizerFormat(quantizer), type(quantizer).__name__
        for size in config.stored_sizes:
            vectors = torch.randn(9, size, 2, generator=generator).transpose(1, 2)  # with strides
            vectors *= torch.tensor([0, 1e-3, 0.1, 1, 1, 3, 10, 100, 1e4])[:, None, None]
            vectors[4, :, 0] = 50  # one number much larger than the others
            given = vectors.clone()
            encoded = storage.encode(vectors)
            if not torch.equal(vectors, given):
                raise Broken(f"{name}.encode changes what it is given; work on a copy")
            stored = [one.clone() for one in encoded]
            decoded = storage.decode(encoded, torch.float64)
            if not all(map(torch.equal, encoded, stored)):
                raise Broken(f"{name}.decode changes what is stored; work on a copy")
            if decoded.shape != vectors.shape or not decoded.isfinite().all():
                found = f"{tuple(decoded.shape)}, or numbers that are not finite"
                raise Broken(f"{name}.decode returns {found}, for {tuple(vectors.shape)}")
            for i in range(9):
                alone = storage.encode(vectors[i : i + 1, :1])
                together = [one[i : i + 1, :1] for one in encoded]
                if not all(map(torch.equal, alone, together)):
                    raise Broken(f"{name}.encode depends on what is beside a vector")
    return 0.0


@torch.inference_mode()
def check_calls(config: ModelConfig, serving: ServingConfig) -> float:
    """What is called of members in a pass returns and changes what it may."""
    model = make_model(config)
    with ExitStack() as stack:
        for member in _list_members(serving):
            stack.enter_context(member.watch())
        passes = [model(draw_tokens(), cache=model.new_cache(ROWS, TOKENS, serving)) for _ in "ab"]
    return _require_equal(*passes)


def _list_members(section: SpecModel) -> Iterator[Member]:
    for value in vars(section).values():
        if isinstance(value, Member):
            yield value
        elif isinstance(value, SpecModel):
            yield from _list_members(value)


Check = Callable[[ModelConfig, ServingConfig], float]
CHECKS: dict[str, Check] = {
    "tensors and numbers are as a layer needs them": check_shapes,
    "cached logits equal those of one pass": check_cached_logits,
    "rows of several lengths equal each alone": check_rows,
    "packed documents equal each alone": check_documents,
    "rotary positions count distances alone": check_distances,
    "chunks equal single tokens, in the declared bytes": check_cache,
    "parameters are as declared": check_parameters,
    "gradients reach every weight": check_gradients,
    "a training lowers its loss": check_training,
}
SERVED_CHECKS: dict[str, Check] = {
    "rows of several lengths equal each alone": check_served_rows,
    "chunks equal single tokens, in the declared bytes": check_cache,
}
FIRST_CHECKS = (check_shapes, check_vectors, check_calls)
"""Where these fail, others would for the same reason."""


def list_checks(member: Member) -> dict[str, Check]:
    """Return what a member of a kind must do."""
    if isinstance(member, Quantizer):
        return {"each vector is stored by itself": check_vectors, **SERVED_CHECKS}
    if any(member.checked_servings):
        return {"calls return and change what they may": check_calls, **SERVED_CHECKS}
    return CHECKS


@torch.inference_mode()
def check_metric(metric: TokenMetric, seed: int) -> None:
    """A metric gives a finite number for each token, the same whatever tokens are beside it."""
    draw = random.Random(seed)
    shape, size = (draw.randint(1, 3), draw.randint(2, 16)), draw.choice((5, 41, 300))
    generator, count = torch.Generator().manual_seed(seed), math.prod(shape)
    logits = torch.randn(count, size, generator=generator) * draw.choice((0.1, 1.0, 20.0))
    ids = torch.randint(0, size, (shape[0], shape[1] + 1), generator=generator)
    windows, targets = ids[:, :-1], ids[:, 1:].flatten()
    places = torch.ones(shape, dtype=torch.bool).nonzero()
    first = draw.randint(1, count - 1)
    parts = (slice(0, count), slice(0, first), slice(first, count))
    scores = []
    for part in parts:
        own = targets[part]
        tokens = ScoredTokens(logits[part], own, windows, *places[part].unbind(1))
        values = metric.score(tokens.clone())
        try:
            scores.append(select_scores(values, len(own)))
        except ValueError as error:
            text = f"{error} ({len(own)} tokens, {size} logits each)"
            raise MemberError(metric, text) from None
    whole, parted = scores[0], torch.cat(scores[1:])
    if not torch.allclose(whole, parted, rtol=1e-5, atol=1e-6, equal_nan=True):
        raise Broken(f"differs where {count} tokens are scored as {first} and {count - first}")
