"""Differential fuzzing of the model and its caches against a dense float64 reference.

    python -m tests.studies fuzz_model --cases 100000 --first 0 --device cuda

A case is a random configuration, dtype, cache format, chunking, batch, row lengths, sharing and
tie rule, a function of its number alone. Cache entries that hold nothing are poisoned: with NaN
where rows are of equal length, and where masks are needed (rows of different lengths) with 1e30,
which a masked softmax multiplies by an exact zero. ``KVLAB_PLAIN=1`` fuzzes the plain code instead
of the CPU kernels.
"""

import random
import re
import time
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvlab.layout import KVLayout, parameter_count
from kvlab.model import GPT
from kvlab.own_extensions import load_parts
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.spec.dtypes import DTYPES, ROTATIONS
from kvlab.spec.experiment import ServedModel
from tests.studies import read_options
from tests.support.reference_model import ReferenceModel, read_weights

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 0.15}
"""On CPU: of a logit, and of a bfloat16 model the share of a token's norm of logits."""

DEVICE_FACTOR = {"cpu": 1, "cuda": 5}
"""A GPU adds up in other orders, and its attention in float32 multiplies in parts."""

LONGEST = 48
PARTNERS = {"int8": "int4", "fp8": "model", "int4": "fp8", "model": "int8", "float16": "int4",
            "kivi4": "kivi2", "kivi2": "kivi4"}  # fmt: skip
"""By the dtype of K: that of V in cases with two."""

WINDOWS = [1, 2, 3, 5, 8, 13, 47, 48, 60]


@dataclass
class Case:
    """One random case: ``chunks[i][b]`` tokens of row b in pass i."""

    number: int
    config: ModelConfig
    serving: ServingConfig
    dtype: torch.dtype
    chunks: list[list[int]]
    is_ragged: bool


def draw_case(number: int) -> Case:
    """Return case ``number``."""
    rng = random.Random(number)
    while True:
        config, serving = _draw_config(rng), _draw_serving(rng)
        try:
            ServedModel(name="case", model=config, serving=serving)
        except ValueError:
            continue
        break
    if config.kv == "tied" and number % 2 and config.position == "rope":
        config = ModelConfig(
            **{**config.model_dump(by_alias=True, exclude_unset=True), "kv": "rotated_tied"}
        )
    if number % 5 == 2 and config.kv == "separate" and serving.kv_dtype in PARTNERS:
        own = {"k": serving.kv_dtype, "v": PARTNERS[serving.kv_dtype]}
        serving = ServingConfig(**{**serving.model_dump(), "kv_dtype": own})
    if (
        "hadamard" in ROTATIONS
        and number % 3 == 1
        and all(size % 4 == 0 for size in config.stored_sizes)
    ):
        serving = serving.model_copy(update={"kv_rotate": "hadamard"})
    if number % 4 < 2 and getattr(serving, "evict", None) is not None:
        evict = serving.evict.model_copy(update={"top_share": (0.3, 1.6)[number % 2]})
        other = serving.model_copy(update={"evict": evict})
        with suppress(ValueError):
            ServedModel(name="case", model=config, serving=other)
            serving = other
    rows, is_ragged = rng.randint(1, 3), rng.random() < 0.4
    # a quantized float32 model rounds differently from the float64 reference at code boundaries
    is_single = serving.kv_dtype in ("model", "float32") and rng.random() < 0.4
    # a norm of what attention returns may divide rounding by next to nothing
    is_single = is_single and config.norm_placement == "pre"
    dtype = torch.float32 if is_single else torch.float64
    chunks = _draw_chunks(rng, rows, rng.randint(1, LONGEST), is_ragged)
    if is_single and rng.random() < 0.4:
        dtype = torch.bfloat16
    return Case(number, config, serving, dtype, chunks, is_ragged)


def _draw_config(rng: random.Random) -> ModelConfig:
    heads = rng.choice([1, 2, 4, 6])
    layers = rng.randint(1, 8)
    pattern = rng.choice(["G", "L", "GL", "LG", "LLG", "GLLLLL", "GGL", "GGGN", "LWN", "WWG"])
    local = "L" in (pattern * layers)[:layers]
    shape = {
        "vocab_size": rng.randint(3, 40), "block_size": LONGEST, "n_layer": layers, "n_head": heads,
        "n_kv_head": rng.choice([n for n in (1, 2, 3, 6) if heads % n == 0]), "n_embd": 4 * heads,
        "head_dim": rng.choice([4, 8]), "ffn_dim": rng.choice([4, 16]),
        "position": rng.choice(["learned", "rope", "none"]),
        "norm": rng.choice(["layernorm", "rmsnorm"]),
        "mlp": rng.choice(["gelu", "swiglu", "geglu"]),
        "norm_placement": rng.choice(["pre", "pre", "sandwich"]), "qk_norm": rng.random() < 0.3,
        "attention_scale": rng.choice([None, None, 0.1, 1.0]),
        "embedding_scale": rng.choice([1.0, 1.0, 3.5]), "rope_scaling": _draw_scaling(rng),
        "bias": rng.random() < 0.5, "tie_embeddings": rng.random() < 0.5,
        "attention_pattern": pattern, "window": rng.choice(WINDOWS) if local else None,
    }  # fmt: skip
    while True:
        kv = _draw_kv(rng)
        shape |= {"kv": kv, "rotary_share": rng.choice([0.0, 0.5, 1.0])}
        if kv not in ("separate", "tied"):
            shape["rotary_share"] = 1.0
            shape["qk_norm"] = False
        if kv == "tied":
            shape["qk_norm"] = False
        if isinstance(kv, dict):
            shape["n_kv_head"] = heads
        by_kind = _draw_kinds(rng, shape)
        shape |= {"sink": rng.choice(["none", "learned"])}
        shape |= {"sink_tokens": rng.choice([0, 0, 1, 2, 4, 9, 50])}
        try:
            return ModelConfig(**shape, **by_kind, kv_sharing=_draw_sharing(rng, layers))
        except ValueError:
            continue


def _draw_kv(rng: random.Random) -> object:
    """Return what a token stores; the rules refuse some of it with some positions."""
    latent = {"latent": rng.choice([1, 3, 8, 20]), "groups": rng.choice([1, 1, 2, 3])}
    latent |= {"rotary": rng.choice([0, 2, 6]), "query": rng.choice([None, None, 7])}
    return rng.choice(["separate", "separate", "tied", "grouped_tied", latent])


def _draw_scaling(rng: random.Random) -> object:
    if rng.random() < 0.6:
        return None
    factor = rng.choice([1.0, 3.0, 8.0])
    if rng.random() < 0.5:
        return {"by": "linear", "factor": factor}
    limits = {"original": rng.choice([4, 16, 300]), "truncate": rng.random() < 0.5}
    turns = {"beta_fast": rng.choice([2.0, 32.0]), "beta_slow": rng.choice([0.1, 1.0])}
    return {"by": "yarn", "factor": factor, **limits, **turns}


def _draw_kinds(rng: random.Random, shape: dict) -> dict:
    """Return settings by kind of layer: all that N and W need, and some of G's and L's."""
    settings = {}
    for letter, key in (("G", "global"), ("L", "local"), ("N", "N"), ("W", "W")):
        if letter not in shape["attention_pattern"] or (letter in "GL" and rng.random() < 0.5):
            continue
        own = {
            "n_kv_head": rng.choice([n for n in (1, 2, 3, 6) if shape["n_head"] % n == 0]),
            "head_dim": rng.choice([4, 8]), "position": rng.choice(["rope", "none"]),
            "rope_theta": rng.choice([100.0, 1e6]), "rotary_share": rng.choice([0.0, 0.5, 1.0]),
            "rope_scaling": _draw_scaling(rng), "window": rng.choice(WINDOWS),
        }  # fmt: skip
        left_out = {name for name in own if rng.random() < 0.5}
        left_out |= {"position"} if shape["position"] == "learned" else set()
        left_out |= {"window"} if letter in "GN" else set()
        if shape["kv"] not in ("separate", "tied"):
            left_out |= {"n_kv_head", "position", "rotary_share"}
        left_out -= {"window"} if letter == "W" else set()
        settings[key] = {name: value for name, value in own.items() if name not in left_out}
    kinds = {letter: settings.pop(letter) for letter in "NW" if letter in settings}
    return {**settings, "kinds": kinds}


def _draw_serving(rng: random.Random) -> ServingConfig:
    coarse = ["int8", "fp8", "int4"]
    blocks = [name for name in ("kivi4", "kivi2", "kivi2") if name in DTYPES]
    kv_dtype = rng.choice(["model"] * 4 + ["float32", "bfloat16", "float16", *coarse, *blocks])
    groups = [4, None] if kv_dtype in coarse else [4, 8] if kv_dtype in blocks else [None]
    group = rng.choice(groups)
    residual = rng.choice([0, 1, 2, 5, 16]) if kv_dtype in blocks else None
    evicts = kv_dtype not in blocks and rng.random() < 0.3
    return ServingConfig(
        kv_dtype=kv_dtype, kv_group=group, **{} if residual is None else {"kv_residual": residual},
        **_draw_eviction(rng) if evicts and "eviction" in load_parts() else {},
        tie=_draw_sharing(rng, 8) if rng.random() < 0.5 else "none",
        tie_rule=rng.choice(["overwrite", "owner"]),
    )  # fmt: skip


def _draw_eviction(rng: random.Random) -> dict[str, object]:
    while True:
        by = rng.choice(["recency", "heavy_hitters", "snapkv", "snapkv"])
        keep, sinks = rng.choice([2, 3, 5, 8, 13, 40, 60]), rng.choice([0, 1, 4, None])
        recent = None if by == "recency" else rng.choice([1, 3, None])
        of_prompt = {"prompt": rng.choice([4, 9, 20, 36, 47]), "pool": rng.choice([1, 3, None])}
        try:
            more = of_prompt if by == "snapkv" else {}
            settings = {"keep": keep, "by": by, "sinks": sinks, "recent": recent, **more}
            return {"evict": ServingConfig(evict=settings).evict}
        except ValueError:
            continue


def _draw_sharing(rng: random.Random, layers: int) -> object:
    owners = [layer if rng.random() < 0.5 else rng.randint(0, layer) for layer in range(layers)]
    names = ["none", "adjacent:2", "adjacent:3", "character-ai", "sandwich", "trailing:2"]
    return rng.choice([*names, owners])


def _draw_chunks(rng: random.Random, rows: int, total: int, is_ragged: bool) -> list[list[int]]:
    ends = [rng.randint(1, total) if is_ragged else total for _ in range(rows)]
    lengths, chunks = [0] * rows, []
    while lengths != ends:
        size = rng.choice([1, 1, 1, 2, 3, 7, 20, 48])
        sizes = [rng.randint(0, size) if is_ragged else size for _ in range(rows)]
        added = [min(n, end - held) for n, end, held in zip(sizes, ends, lengths, strict=True)]
        if any(added):
            chunks.append(added)
            lengths = [held + n for held, n in zip(lengths, added, strict=True)]
    return chunks


def find_tolerance(case: Case, device: str = "cpu") -> float:
    """Return the largest error with which the case computed on ``device`` is right."""
    factor = 1 if case.dtype == torch.bfloat16 else DEVICE_FACTOR[device]
    return factor * TOLERANCE[case.dtype]


def run_case(
    case: Case, device: str = "cpu", make_reference: type[ReferenceModel] = ReferenceModel
) -> float:
    """Return the largest error in the case, computed on ``device``, as `TOLERANCE` has it.

    Raises:
        AssertionError: cache bytes or parameters differ from the formula.
    """
    model = make_model(case).to(device)
    rows = len(case.chunks[0])
    layout = KVLayout.of(case.config, case.serving)
    cache = model.new_cache(rows, LONGEST, case.serving)
    dtype = str(case.dtype).removeprefix("torch.")
    assert cache.nbytes == layout.stored_bytes(rows, LONGEST, dtype)
    assert _evaluate(layout.formula(rows, LONGEST, dtype)) == (cache.nbytes, cache.nbytes)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(case.config)
    for tensor in cache.tensors:
        poison(tensor, case.is_ragged)
    weights, serving = read_weights(make_model(case)), case.serving
    stored = (serving.kv_dtype, serving.kv_group, serving.kv.residual)
    stored = (*stored, getattr(serving, "evict", None))
    stored = (*stored, serving.kv_rotate)
    references = [
        make_reference(case.config, weights, list(layout.owners), serving.tie_rule, *stored)
        for _ in range(rows)
    ]
    largest = 0.0
    for added in case.chunks:
        tokens = torch.randint(0, case.config.vocab_size, (rows, max(added)))
        lengths = added if case.is_ragged else None
        with torch.inference_mode():
            logits = model(tokens.to(device), cache=cache, lengths=lengths).cpu()
        for row, count in enumerate(added):
            if count:
                expected = references[row].logits(tokens[row, :count].tolist())
                right = torch.from_numpy(expected)
                errors = logits[row, :count].double() - right
                if case.dtype == torch.bfloat16:
                    errors = errors.norm(dim=-1) / right.norm(dim=-1)
                error = errors.abs().max()
                largest = max(largest, float("inf") if error.isnan() else float(error))
    return largest


def _evaluate(formula: str) -> tuple[int, int]:
    """Return what the arithmetic of `KVLayout.formula` gives, and the total that it states."""
    arithmetic, total = re.sub(r"\(K, V\)|of \d+ tokens|,", "", formula).split(" = ")
    symbols = re.findall(r"\b(?:\d+|x)\b|[()+/]", arithmetic)
    return eval("".join(symbols).replace("x", "*")), int(total.removesuffix(" bytes"))


def make_model(case: Case) -> GPT:
    torch.manual_seed(case.number)
    model = GPT(case.config, seed=case.number)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that every path matters
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(case.dtype)


def poison(tensor: torch.Tensor, is_finite: bool) -> None:
    if tensor.dtype in (torch.int8, torch.uint8, torch.int32):
        tensor.fill_(127)
    elif tensor.dtype == torch.float8_e4m3fn:
        tensor.fill_(448.0)
    elif is_finite:
        tensor.fill_(6e4 if tensor.dtype == torch.float16 else 1e30)
    else:
        tensor.fill_(float("nan"))


def main() -> int:
    """Run many cases and print every disagreement; return 1 if there was one."""
    options = read_options(__doc__, cases=10_000, first=0, device="cpu", seconds=float("inf"))
    torch.set_num_threads(1)
    largest_errors, begun, count = dict.fromkeys(TOLERANCE, 0.0), time.monotonic(), 0
    failures = 0
    while count < options.cases and time.monotonic() - begun < options.seconds:
        case = draw_case(options.first + count)
        try:
            error = run_case(case, options.device)
        except Exception:
            print(f"case {case.number} failed:\n  {case}", flush=True)
            raise
        largest_errors[case.dtype] = max(largest_errors[case.dtype], error)
        if not error <= find_tolerance(case, options.device):
            failures += 1
            print(f"case {case.number}: {error:.3g}\n  {case}", flush=True)
        count += 1
        if count % 1000 == 0:
            print(f"{count} cases, {failures} disagreements, largest errors {largest_errors}")
    print(f"{count} cases, {failures} disagreements", flush=True)
    return int(failures > 0)
