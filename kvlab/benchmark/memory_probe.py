"""One try of a batch size: weights, cache, prefill and one step, in as much memory as is given."""

import ctypes
import resource
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvlab.benchmark.decode_timing import TimedDecoder
from kvlab.model import GPT
from kvlab.model.generate import decode_step, prefill
from kvlab.oom import classify_oom
from kvlab.spec import ServingConfig
from kvlab.spec.model_config import ModelConfig

_BLOCKS = (2**30, 2**16)
"""The largest and the smallest block in which free memory of the process is taken."""

_TINY = ModelConfig(vocab_size=8, block_size=8, n_layer=1, n_head=1, n_embd=8)


@dataclass(frozen=True)
class DecodeAttempt:
    """Fills a cache of ``prompt_tokens`` + 1 and room for the rest, and decodes one token.

    The cache is made at its full length, so nothing grows later.

    Attributes:
        memory: bytes that this may add to the process. On CPU a hard limit of the system on its
            private memory, on CUDA one of the allocator; None: all that the device has.
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
        """Raises MemoryError if it does not fit."""
        torch.set_num_threads(self.threads)
        if self.memory is not None:
            self._decode(_TINY, 1, 1, 1)  # so that all libraries are loaded before the limit holds
            if self.device == "cpu":
                _limit_private_memory(self.memory)
            else:
                _limit_cuda_memory(self.memory)
        try:
            self._decode(self.model, batch, self.prompt_tokens, self.new_tokens)
        except (MemoryError, RuntimeError, OSError) as error:
            if classify_oom(error):
                raise MemoryError from None
            raise

    def without_limit(self) -> "_UnlimitedAttempt":
        """The same try in all memory that there is."""
        return _UnlimitedAttempt(replace(self, memory=None))

    def _decode(self, config: ModelConfig, batch: int, prompt_tokens: int, new_tokens: int) -> None:
        dtype = getattr(torch, self.dtype)
        model = GPT(config, device="meta", dtype=dtype).to_empty(device=self.device).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # pages that nobody has written are not memory yet
        serving = ServingConfig() if config is _TINY else self.serving
        cache = TimedDecoder(model, serving).new_cache(batch, prompt_tokens + new_tokens)
        with torch.inference_mode():
            prompt = torch.zeros(batch, prompt_tokens, dtype=torch.int64, device=self.device)
            prefill(model, prompt, cache)
            decode_step(model, prompt[:, 0], cache)
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


@dataclass(frozen=True)
class _UnlimitedAttempt:
    attempt: DecodeAttempt

    def __call__(self, batch: int) -> None:
        self.attempt(batch)


def _limit_private_memory(more: int) -> None:
    """Lets this process take ``more`` bytes of private memory beyond what it uses now.

    What it freed before and kept (imports that had to be compiled leave megabytes) would
    serve the try unseen, so it is taken first.
    """
    _set_data_limit(_private_bytes())
    _exhaust_free_memory()
    _set_data_limit(_private_bytes() + more)


def _set_data_limit(most: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmData":
            return int(value.split()[0]) * 1024
    raise OSError("this system does not say how much memory a process has")


def _exhaust_free_memory() -> None:
    """Under a limit at which nothing more is given: what malloc still finds was free."""
    malloc = ctypes.CDLL(None).malloc
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    size, smallest = _BLOCKS
    while size >= smallest:
        if malloc(size) is None:
            size //= 2


def _limit_cuda_memory(most: int) -> None:
    """Lets this process's allocator hold ``most`` bytes of the device's memory."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total))
