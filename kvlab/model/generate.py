"""Prefill, one decode step, and generate: plain functions over a model and a cache.

Shapes: B rows, C prompt tokens, V vocab_size.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from kvlab.cache import KVCache
from kvlab.cache.static_pass import StaticPass
from kvlab.model.attention_backends import record_kernels, run_compiled
from kvlab.model.decode_attention import DECODE_KERNEL
from kvlab.model.gpt import GPT
from kvlab.model.kernels.triton_kernels import store_codes
from kvlab.model.kernels.triton_runtime import are_kernels_usable
from kvlab.spec import ServingConfig
from kvlab.spec.model_config import ModelConfig

T = TypeVar("T")

STOP_CHECK_INTERVAL = 16
"""Steps between checks whether all rows have ended; each check waits for the device."""


def prefill(
    model: GPT, tokens: Tensor, cache: KVCache | None, lengths: Sequence[int] | None = None
) -> Tensor:
    """Run prompts through the model, into an empty cache or without one.

    The last layer's MLP and the head run on each row's last token alone, and so do all upper
    layers that write no K/V, as under ``kv_sharing: trailing:K``.

    Args:
        tokens: (B, C), padded at the end to C.
        cache: an empty cache, or None.
        lengths: (B,) real tokens of each row; default C.

    Returns:
        The logits (B, V) of each row's last real token.
    """
    hidden_states = model.hidden_states(
        tokens,
        cache,
        None if cache is None else lengths,
        token_indices=last_token_indices(tokens, lengths),
        are_last=cache is not None or lengths is None,
    )
    return model.compute_logits(hidden_states)


SLICE_TOKENS = {"cpu": 4096, "cuda": 65_536}
"""Tokens of one slice of a prefill."""


def prefill_in_slices(model: GPT, tokens: Tensor, cache: KVCache) -> Tensor:
    """Run prompts (B, C) into an empty cache, some rows after others.

    The activations are those of `SLICE_TOKENS` tokens, so that a large batch needs little beside
    its cache.

    Returns:
        The logits (B, V) of each row's last token.
    """
    limit = SLICE_TOKENS.get(tokens.device.type, SLICE_TOKENS["cuda"])
    rows = max(1, limit // tokens.shape[1])
    shape = len(tokens), model.config.vocab_size
    logits = torch.empty(shape, dtype=model.dtype, device=model.device)
    for start in range(0, len(tokens), rows):
        part = slice(start, start + rows)
        logits[part] = prefill(model, tokens[part], cache.slice_rows(start, start + rows))
    cache.advance(tokens.shape[1])
    return logits


def last_token_indices(tokens: Tensor, lengths: Tensor | Sequence[int] | None) -> Tensor:
    """Return the index (B,) of each row's last real token in the flattened ``tokens`` (B, C)."""
    rows, count = tokens.shape
    ends = count if lengths is None else torch.as_tensor(lengths, device=tokens.device)
    return torch.arange(rows, device=tokens.device) * count + ends - 1


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_k: keep only the k likeliest tokens.
        top_p: then keep only the fewest tokens whose probabilities reach p (nucleus sampling,
            arXiv 1904.09751).

    Raises:
        ValueError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            text = f"temperature = {self.temperature} is not a finite number of at least 0"
            raise ValueError(f"{text}; 0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k = {self.top_k} is below 1; leave it out to keep all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p} is not above 0 and at most 1")


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """Choose one token of each row, on the device of ``logits`` and without synchronising.

    Args:
        logits: (B, V).

    Returns:
        (B,) of int64.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    # the largest becomes 0, so that no temperature overflows
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        kth_largest = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth_largest, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, index = logits.sort(-1, descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
        mass_before[:, 0] = 0.0  # so that at least one token stays
        is_dropped = torch.zeros_like(mass_before, dtype=torch.bool)
        is_dropped = is_dropped.scatter(-1, index, mass_before >= sampling.top_p)
        logits = logits.masked_fill(is_dropped, -torch.inf)
    # argmax of p / Exp(1) draws from p; unlike multinomial it does not wait for the sum
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits.softmax(-1) / noise).argmax(-1)


@torch.inference_mode()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop: Collection[int] = (),
    seed: int = 0,
    serving: ServingConfig | None = None,
    cached: bool = True,
    on_tokens: Callable[[list[int]], None] | None = None,
    prepare: "Callable[[GPT, KVCache], Decoder] | None" = None,
) -> list[list[int]]:
    """Continue each prompt by up to ``new_tokens`` tokens.

    Args:
        prompts: rows of token ids, of any lengths above 0.
        sampling: default greedy.
        stop: a row ends with the first of these tokens, which is its last.
        seed: of the draws. The same seed, prompts and device give the same tokens.
        serving: how K/V are stored and tied.
        cached: without a cache every step runs the whole text again, the slow baseline.
        on_tokens: called after each step with one new token for each row. Rows that have ended
            continue with tokens that are not returned. Every step then waits for the device.
        prepare: in place of `make_decoder`, such as one that measures what that takes.

    Returns:
        The new tokens of each row, without the prompt.

    Raises:
        ValueError: a prompt is empty, holds an unknown id, or exceeds the learned positions, or a
            number is outside its range.
    """
    _check_request(model, prompts, new_tokens, seed)
    sampling, device = sampling or Sampling(), model.device
    generator = torch.Generator(device).manual_seed(seed)
    stop_tokens = torch.tensor(sorted(stop), device=device)
    has_ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    rows, lengths = [list(prompt) for prompt in prompts], [len(prompt) for prompt in prompts]
    cache = model.new_cache(len(rows), max(lengths) + new_tokens, serving) if cached else None
    is_ragged = len(set(lengths)) > 1
    given = None if cached and not is_ragged else lengths
    logits = prefill(model, _pad_right(rows, device), cache, given)
    decoder = None if cache is None else (prepare or make_decoder)(model, cache)
    generated: list[Tensor] = []
    for step in range(new_tokens):
        if step and decoder is not None:
            logits = decoder(generated[-1])
        elif step:
            for row, token in zip(rows, generated[-1].tolist(), strict=True):
                row.append(token)
            logits = prefill(model, _pad_right(rows, device), None, [len(row) for row in rows])
        tokens = sample(logits, sampling, generator)
        generated.append(tokens)
        if on_tokens is not None:
            on_tokens(tokens.tolist())
        if stop:
            has_ended |= torch.isin(tokens, stop_tokens)
            is_check_due = on_tokens or step % STOP_CHECK_INTERVAL == STOP_CHECK_INTERVAL - 1
            if is_check_due and bool(has_ended.all()):
                break
    replies = torch.stack(generated, 1).tolist() if generated else [[] for _ in prompts]
    ends = (next((i for i, token in enumerate(reply) if token in stop), None) for reply in replies)
    return [reply if end is None else reply[: end + 1]
            for reply, end in zip(replies, ends, strict=True)]  # fmt: skip


def check_vocabulary(config: ModelConfig, tokens: Sequence[int]) -> None:
    """Raise ValueError if a token id is not in the vocabulary."""
    for token in tokens:
        if not 0 <= token < config.vocab_size:
            text = f"token id = {token} is not in the vocabulary of {config.vocab_size}"
            raise ValueError(f"{text}; use 0 to {config.vocab_size - 1}")


def _check_request(
    model: GPT, prompts: Sequence[Sequence[int]], new_tokens: int, seed: int
) -> None:
    if not prompts or not all(prompts):
        raise ValueError("a prompt is empty; give each row at least one token")
    for name, number, limit in (("new_tokens", new_tokens, 2**31), ("seed", seed, 2**63)):
        if not 0 <= number < limit:
            raise ValueError(f"{name} = {number} is out of range; use 0 to {limit - 1}")
    config = model.config
    for prompt in prompts:
        check_vocabulary(config, prompt)
    length = max(map(len, prompts)) + max(0, new_tokens - 1)  # the last token is never an input
    config.check_positions(length, "shorten the text, or ask for fewer new tokens")


def _pad_right(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    longest = max(map(len, prompts))
    rows = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    return torch.tensor(rows, device=device)


class Decoder(Protocol):
    """A decode step of one cache."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """Take tokens (B,); return the next logits (B, V), valid until the next call."""

    def count_read_slots(self, held: int) -> int | None:
        """Return the slots of each row that a step reads where the longest holds ``held`` tokens.

        See `KVCache.count_read_slots`.
        """


def make_decoder(
    model: GPT, cache: KVCache, *, head: bool = True, compiles: bool | None = None
) -> Decoder:
    """Return a decoder that continues from ``cache``, after the prompts have been run into it.

    At batch size 1 a decode step of a small model is bound by launching its kernels. On CUDA a
    captured graph launches them all at once, and those of a compiled step are fewer.

    Args:
        head: if false, the decoder returns the residual stream (B, E) in place of logits.
        compiles: whether to compile the step; default `ServingConfig.compile` of the cache. It is
            compiled anew for other sizes of a batch or cache.
    """
    compiles = cache.compiles_steps if compiles is None else compiles
    if model.device.type == "cuda" and cache.has_static_pass:
        return GraphDecoder(model, cache, head=head, compiles=compiles)
    if compiles:
        # which notes its attention kernels, as a compiled one does not
        StaticDecoder(model, cache, head=head).compute(cache.max_length)
        decoder = StaticDecoder(model, cache, head=head, compiles=True)
        decoder.compute(cache.max_length)  # so that no step of a text compiles
        return decoder
    return EagerDecoder(model, cache, head=head)


class EagerDecoder:
    """Run the model's own forward pass. On CPU it reads only the entries in use, unmasked."""

    def __init__(self, model: GPT, cache: KVCache, *, head: bool = True):
        self._model, self._cache, self._head = model, cache, head

    def __call__(self, tokens: Tensor) -> Tensor:
        states = self._model.hidden_states(tokens[:, None], self._cache)[:, -1]
        return self._model.compute_logits(states) if self._head else states

    def count_read_slots(self, held: int) -> int | None:
        return self._cache.count_read_slots(held + 1)


class GraphDecoder:
    """Capture a static step as a CUDA graph, and replay it for every token.

    The graph reads all entries of the cache, or where the kernel of one token's attention runs
    those in use. Warm-ups, the capture and the first replay, which uploads a graph, are done here,
    so that no step of a text is slower than the others.
    """

    def __init__(self, model: GPT, cache: KVCache, *, head: bool = True, compiles: bool = False):
        self._cache = cache
        self._static_decoder = StaticDecoder(model, cache, head=head, compiles=compiles)
        with record_kernels() as self._kernels:  # those of a compiled step, which notes none
            StaticDecoder(model, cache, head=head).compute(cache.max_length)
        step = partial(self._static_decoder.compute, cache.max_length)
        self._graph, self._out = capture_graph(step, cache.device)  # computes the first step again

    def __call__(self, tokens: Tensor) -> Tensor:
        self._static_decoder.prepare(tokens)
        self._graph.replay()
        self._static_decoder.advance()
        return self._out

    def count_read_slots(self, held: int) -> int | None:
        reads_used = self._kernels == {DECODE_KERNEL}  # which stops where a row's tokens end
        return self._cache.count_read_slots(held + 1 if reads_used else self._cache.max_length)


WARM_UPS = 3
"""Runs before a capture: lazy set-up must not happen inside it."""


def capture_graph(work: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture ``work`` as a CUDA graph, and replay it once, which uploads it.

    Returns:
        The graph, and what ``work`` returned: tensors that each replay fills.
    """
    graph, stream = torch.cuda.CUDAGraph(), capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        out = work()
    graph.replay()
    return graph, out


@lru_cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one side stream on which everything is captured.

    cuBLAS keeps a workspace for each stream that it has seen, 32 MiB on a large GPU.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # as torch declares it


def release_workspaces() -> None:
    """Release the workspaces that cuBLAS keeps for the streams of CUDA devices.

    PyTorch counts them as allocated until then ("cuBLAS workspaces" in its notes on CUDA). A graph
    that was captured with them must not be replayed afterwards.
    """
    torch._C._cuda_clearCublasWorkspaces()


class StaticDecoder:
    """A decode step of fixed shapes and addresses, as a CUDA graph captures it. Runs anywhere.

    `compute` reads tokens and positions from fixed tensors, so it may run any number of times
    without advancing: it writes the same cache entries again. The step follows its cache: after
    `reset` or a further pass it goes on from the tokens that the cache then holds.

    Args:
        compiles: compile the step at its first use. It then reads all entries, since each number
            of them would be compiled anew.
    """

    def __init__(self, model: GPT, cache: KVCache, *, head: bool = True, compiles: bool = False):
        self._model, self._head, self._cache = model, head, cache
        self._compiles = compiles
        self._tokens = torch.zeros(cache.batch_size, 1, dtype=torch.int64, device=cache.device)
        has_kernel = are_kernels_usable(cache.device)
        self._pass = StaticPass(cache, store_codes if has_kernel else None)
        self._rotations = model.prepare_positions(self._pass.position_limit)  # kept for a graph

    def __call__(self, tokens: Tensor) -> Tensor:
        self.prepare(tokens)
        out = self.compute(self._count_entries(self._cache.length))
        self.advance()
        return out

    def _count_entries(self, held: int) -> int:
        return self._cache.max_length if self._compiles else held + 1

    def count_read_slots(self, held: int) -> int | None:
        return self._cache.count_read_slots(self._count_entries(held))

    def prepare(self, tokens: Tensor) -> None:
        """Take the tokens (B,) of the next step."""
        self._pass.prepare()
        self._tokens.copy_(tokens[:, None])

    def compute(self, entries: int) -> Tensor:
        """Return the logits (B, V) of the step, or without a head its residual stream (B, E).

        Args:
            entries: of the cache that it reads: the longest row's tokens with this one, or more.
        """
        self._pass.read_limit = entries
        run = _run_compiled_step if self._compiles else _run_step
        return run(self._model, self._tokens, self._pass, self._head)

    def advance(self) -> None:
        """Advance the cache by the step's tokens."""
        self._pass.advance()


def _run_step(model: GPT, tokens: Tensor, step: StaticPass, head: bool) -> Tensor:
    states = model.run_pass(tokens, step)[:, -1]
    return model.compute_logits(states) if head else states


STEP_SHAPES = 64
"""Sizes of batches and caches whose steps stay compiled. torch's own limit is 8."""


def _run_compiled_step(model: GPT, tokens: Tensor, step: StaticPass, head: bool) -> Tensor:
    """Run the step as compiled for models, batches and caches of these sizes."""
    return run_compiled(STEP_SHAPES, lambda: _compile_step()(model, tokens, step, head))


@lru_cache(maxsize=1)
def _compile_step() -> Callable[[GPT, Tensor, StaticPass, bool], Tensor]:
    remove_torn_libraries()
    options: dict[str, str | int | bool | Callable[..., object]] = {
        # Inductor's products of one row read weights at the memory's speed only when they are
        # tuned, and if their inputs are not computed again for each block of outputs
        "coordinate_descent_tuning": True,
        "realize_opcount_threshold": 7,  # operations: norms and GELU have more, rotations fewer
    }
    return torch.compile(_run_step, fullgraph=True, dynamic=False, options=options)


def remove_torn_libraries() -> None:
    """Remove libraries that were never finished: Inductor would load them, and fail each time.

    A linker writes the first bytes of a library last. One that a process is making at this moment
    stays.
    """
    from filelock import FileLock, Timeout
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # which takes a second

    for library in Path(cache_dir()).glob("*/*.so"):
        lock = library.parents[1] / "locks" / f"{library.name.split('.')[0]}.lock"
        try:
            with FileLock(lock, timeout=0), library.open("rb") as file:
                is_torn = not file.read(4).strip(b"\0")
                if is_torn:
                    library.unlink()
        except (Timeout, OSError):
            pass  # it is being made, or another process has removed it
