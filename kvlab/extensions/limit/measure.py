"""The largest batch that fits, found by trying in separate processes.

An attempt has weights of its own, so this process moves its weights off the device during the
search. It runs the prompts in slices of rows: the activations of all rows at once would need far
more than the cache, and no server holds them.
"""

import ctypes
import gc
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kvlab.benchmark.measurement import Measurement, TableLayout
from kvlab.benchmark.session import Session, Variant
from kvlab.errors import UsageError
from kvlab.extensions.limit.max_batch_search import find_largest_batch
from kvlab.model import GPT
from kvlab.model.generate import make_decoder, prefill_in_slices, release_workspaces
from kvlab.model.kernels.malloc import read_status_bytes
from kvlab.oom import classify_oom
from kvlab.spec import ServingConfig
from kvlab.spec.model_config import ModelConfig

TABLES = (
    TableLayout("largest batch", {"context_length": "context"}, {
        "largest_batch": "tried", "largest_batch_formula": "room beside weights",
    }),
)  # fmt: skip


def measure(session: Session) -> Iterator[Measurement]:
    """Yield the largest batch by trying, and by the bytes of weights and cache alone.

    Raises:
        UsageError: ``memory`` is more than the device has.
    """
    device, memory = session.device, session.settings.options.get("limit")
    if device.type != "cuda" and memory is None:
        session.on_notice("limit is left out: on CPU it needs --limit, such as --limit 8GiB")
        return
    lines: list[Measurement] = []
    try:
        for variant in session.variants:
            variant.model.to("cpu")
        gc.collect()
        if device.type == "cuda":
            release_workspaces()
            torch.cuda.empty_cache()
        available, source = _available_memory(device, memory)
        for variant in session.variants:
            lines += _max_batch_lines(session, variant, memory, available, source)
    finally:
        for variant in session.variants:
            variant.model.to(device)
    yield from lines


def _available_memory(device: torch.device, memory: int | None) -> tuple[int, str]:
    """Return the bytes that an attempt may use, and where the number comes from."""
    if device.type != "cuda":
        assert memory is not None
        return memory, f"{memory:,} bytes given"
    free, total = torch.cuda.mem_get_info(device)
    if memory is not None and memory > total:
        raise UsageError(f"--limit {memory:,} is over the device's {total:,}; give less")
    if memory is None or memory > free:
        return free, f"{free:,} bytes free on the device"
    return memory, f"{memory:,} bytes given"


def _max_batch_lines(
    session: Session, variant: Variant, memory: int | None, available: int, source: str
) -> Iterator[Measurement]:
    settings = session.settings
    fields = settings.run_fields(1)
    del fields["batch_size"]
    weights = sum(parameter.nbytes for parameter in variant.model.parameters())
    sequence = variant.layout.stored_bytes(1, fields["context_length"], variant.dtype)
    by_formula = max(0, available - weights) // sequence
    attempt = DecodeAttempt(
        variant.model.config, variant.serving, variant.dtype, session.device.type,
        settings.prompt_tokens, settings.new_tokens, memory, torch.get_num_threads(),
    )  # fmt: skip

    def on_attempt(batch: int, is_fitting: bool) -> None:
        session.on_turn(f"batch {batch} {'fits' if is_fitting else 'does not fit'}")

    largest = find_largest_batch(attempt, by_formula, on_attempt)
    yield session.make_line(
        "limit", "largest_batch", variant, largest, "sequences", note=source, **fields
    )
    yield session.make_line(
        "limit", "largest_batch_formula", variant, by_formula, "sequences", exact=True,
        note=f"{source}, weights and cache alone", **fields,
    )  # fmt: skip


# One attempt, under a limit of memory


_BLOCK_SIZES = (2**30, 2**16)
"""The largest and the smallest block in which the process's free memory is allocated."""

_TINY = ModelConfig(vocab_size=8, block_size=8, n_layer=1, n_head=1, n_embd=8)


@dataclass(frozen=True)
class DecodeAttempt:
    """Prefills a cache and decodes one token.

    The cache is allocated for all ``prompt_tokens + new_tokens``, so nothing grows later.

    Attributes:
        memory: bytes that the attempt may add to its process. On CPU the system enforces it on
            private memory, on CUDA PyTorch's allocator does. None: all that the device has.
    """

    model: ModelConfig
    serving: ServingConfig
    dtype: str
    device: str
    prompt_tokens: int
    new_tokens: int
    memory: int | None
    threads: int

    def __call__(self, batch: int) -> None:
        """Decode with ``batch`` sequences.

        Raises:
            MemoryError: it does not fit.
        """
        torch.set_num_threads(self.threads)
        if self.memory is not None:
            self._decode(_TINY, 1, 1, 1)  # load all libraries before the limit applies
            if self.device == "cpu":
                limit_private_memory(self.memory)
            else:
                limit_cuda_memory(self.memory)
        try:
            self._decode(self.model, batch, self.prompt_tokens, self.new_tokens)
        except (MemoryError, RuntimeError, OSError) as error:
            if classify_oom(error):
                raise MemoryError from None
            raise

    def without_limit(self) -> "DecodeAttempt":
        """Return the same attempt with all memory of the device."""
        return replace(self, memory=None)

    def _decode(self, config: ModelConfig, batch: int, prompt_tokens: int, new_tokens: int) -> None:
        dtype = getattr(torch, self.dtype)
        model = GPT(config, device="meta", dtype=dtype).to_empty(device=self.device).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # pages count as memory only once they are written
        serving = ServingConfig() if config is _TINY else self.serving
        cache = model.new_cache(batch, prompt_tokens + new_tokens, serving)
        with torch.inference_mode():
            prompt = torch.zeros(batch, prompt_tokens, dtype=torch.int64, device=self.device)
            prefill_in_slices(model, prompt, cache)
            # what the compiler needs meanwhile is not what serving needs
            make_decoder(model, cache, compiles=False)(prompt[:, 0])
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


def limit_private_memory(extra: int) -> None:
    """Limit this process to ``extra`` bytes of private memory beyond its current use.

    Memory that the process freed but kept (compiling imports leaves megabytes) would serve the
    attempt without being counted, so it is allocated first.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (read_status_bytes("VmData"), hard))
    malloc = ctypes.CDLL(None).malloc  # now serves only what is free in the process
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    size, smallest = _BLOCK_SIZES
    while size >= smallest:
        if malloc(size) is None:
            size //= 2
    resource.setrlimit(resource.RLIMIT_DATA, (read_status_bytes("VmData") + extra, hard))


def limit_cuda_memory(limit: int) -> None:
    """Limit this process's allocator to ``limit`` bytes beyond what it cannot give back.

    That is what libraries hold of it by now, the workspaces of cuBLAS among others.
    """
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    allowed = torch.cuda.memory_reserved() + limit
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total))
