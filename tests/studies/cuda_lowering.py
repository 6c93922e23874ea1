"""Lower models by `torch.compile` for a CUDA device that this machine does not have.

Tensors are fake: they have shapes and no memory. Inductor makes its kernels for an H100, and Triton
compiles them to machine code. Nothing runs. A build of torch without CUDA does all of this once it
has a device guard and hooks for CUDA, which the C++ code below gives it.

    python -m tests.studies cuda_lowering LIBRARY [CASE ...]

writes one JSON line for each case of `CASES`: its name, and the facts of each graph (see `describe`).
"""

import contextlib
import ctypes
import json
import math
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

LIBRARY_CODE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Device device() { return {c10::DeviceType::CUDA, 0}; }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};

namespace at { C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ::Hooks) }
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, ::Guard) }
"""

H100 = {
    "name": "NVIDIA H100", "major": 9, "minor": 0, "multi_processor_count": 132,
    "max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65_536,
    "shared_memory_per_block_optin": 232_448, "shared_memory_per_multiprocessor": 233_472,
    "L2_cache_size": 50 * 2**20, "total_memory": 80 * 2**30, "warp_size": 32, "gcnArchName": "",
}  # fmt: skip
"""What CUDA says of an H100, as far as Inductor asks."""

GPT2 = {"vocab_size": 50304, "block_size": 1024, "n_head": 12, "n_embd": 768, "position": "rope"}
REDUCED = {"n_kv_head": 1, "attention_pattern": "GL", "window": 256, "kv_sharing": "adjacent:2"}
GATED = {"norm": "rmsnorm", "mlp": "swiglu"}
XL = {"n_head": 25, "n_embd": 1600, "position": "learned"}
ROWS, TOKENS = 8, 1024


def build_library(folder):
    """Compile the code above. A process loads the library by ctypes before it imports torch."""
    torch_folder = Path(sysconfig.get_path("purelib")) / "torch"
    source, library = folder / "guard.cpp", folder / "libguard.so"
    source.write_text(LIBRARY_CODE)
    paths = [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib"]
    libraries = ["-ltorch_cpu", "-lc10"]
    command = ["g++", "-std=c++20", "-shared", "-fPIC", *paths, source, "-o", library, *libraries]
    subprocess.run(command, check=True)
    return library


class Lowered(Exception):
    """Compiled code was called. It cannot run."""


@contextlib.contextmanager
def lowering_for_cuda():
    """Yield a list that gets the facts of every graph that torch.compile lowers in the block."""
    import torch
    import torch._functorch.config
    import torch._inductor.compile_fx
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.fx_passes import fuse_attention
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget

    facts = []

    def stop(*_arguments):
        raise Lowered

    def keep_facts(graph):
        facts.append(describe(graph, graph.codegen()[0].value))
        return SimpleNamespace(call=stop, __file__="", runner=None)

    answers = {
        "is_available": True, "device_count": 1, "current_device": 0,
        "get_device_properties": SimpleNamespace(**H100), "get_device_capability": (9, 0),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
        "exchange_device": 0, "maybe_exchange_device": 0, "_exchange_device": 0,
        "_maybe_exchange_device": 0, "set_device": None, "synchronize": None,
    }  # fmt: skip
    target = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    )
    with contextlib.ExitStack() as stack:
        replace = lambda *names: stack.enter_context(mock.patch.object(*names))  # noqa: E731
        for owner in (torch.cuda, CudaInterface, CudaInterface.Worker):
            for name, answer in answers.items():
                if hasattr(owner, name):
                    replace(owner, name, staticmethod(lambda *_, answer=answer: answer))
        replace(torch.accelerator, "is_available", lambda: False)
        replace(torch, "tensor", make_zeros)
        replace(GraphLowering, "compile_to_module", keep_facts)
        # these three need real tensors
        replace(fuse_attention, "_sfdp_init", lambda *_: None)
        unneeded = {"joint_graph_constant_folding": False, "shape_padding": False}
        stack.enter_context(config.patch(unneeded))
        stack.enter_context(config.patch(profile_bandwidth=True))  # says what a kernel moves
        stack.enter_context(config.patch(fx_graph_cache=False, compile_threads=1))
        lower_backward = {"force_non_lazy_backward_lowering": True}
        stack.enter_context(torch._functorch.config.patch(lower_backward))
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for key in ("CUDA", "AutogradCUDA"):
            library.impl("scaled_dot_product_attention", choose_attention, key)
        stack.enter_context(torch._subclasses.FakeTensorMode())
        yield facts


def make_zeros(data, *, dtype=None, device=None):
    """Stand for `torch.tensor`, which makes a real tensor on its way. Shapes alone matter."""
    import numpy as np
    import torch

    array = np.asarray(data)
    dtype = dtype or (torch.float32 if array.dtype.kind == "f" else torch.int64)
    return torch.zeros(array.shape, dtype=dtype, device=device)


def choose_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
                     enable_gqa=False):  # fmt: skip
    """Take a kernel as torch does with CUDA: flash, else efficient, else math."""
    import torch

    operators, is_half = torch.ops.aten, q.dtype in (torch.float16, torch.bfloat16)
    if attn_mask is None and is_half:
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        flash = operators._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    if not enable_gqa:
        efficient = operators._scaled_dot_product_efficient_attention
        return efficient(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    plain = operators._scaled_dot_product_attention_math
    return plain(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)[0]


def describe(graph, code):
    """Return what the code of one graph launches, allocates and keeps.

    ``kernels`` and ``operators`` count launches by name. ``allocated`` are the elements of the
    largest buffer. ``kept_bytes`` are those of a forward pass for its backward pass, ``shared`` the
    shared memory of each kernel that Triton compiled to machine code. ``moved_bytes`` are what the
    kernels read and write, by Inductor's count: products and attention are operators, not kernels.
    """
    outputs = [] if graph.is_backward else graph.graph_outputs[1:]
    kept = [o for o in outputs if o.get_name() not in graph.graph_inputs]
    sizes = re.findall(r"empty_strided_cuda\(\(([\d, ]*)\),", code)
    kernels = Counter(re.findall(r"^ +(\w+)\.run\(", code, re.M))
    gigabytes = {n: re.search(r"'kernel_num_gb': ([\d.e-]+)", own) for n, own in find_kernels(code)}
    moved = {name: round(1e9 * float(one[1])) for name, one in gigabytes.items() if one}
    operators = re.findall(r"(extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", code)
    return {
        "is_backward": bool(graph.is_backward),
        "kernels": kernels,
        "moved_bytes": sum(count * moved[name] for name, count in kernels.items() if name in moved),
        "operators": Counter(operators),
        "allocated": max(math.prod(map(int, re.findall(r"\d+", size))) for size in sizes),
        "kept_bytes": sum(math.prod(map(int, o.get_size())) * o.get_dtype().itemsize for o in kept),
        "has_float64": bool(re.search(r"fp64|float64", code)),
        "has_trigonometry": bool(re.search(r"\b(cos|sin)\(", code)),
        "waits_for_host": bool(re.search(r"\.item\(|empty_strided_cpu\(|device='cpu'", code)),
        "shared": compile_kernels(code),
        "recomputing": find_recomputing_products(code),
    }


def find_recomputing_products(code):
    """Return the products that apply a function to their input anew for each block of outputs."""
    found = []
    for name, source in find_kernels(code):
        outputs, before_sum = re.search(r"xnumel = (\d+)", source), source.rpartition("tl.sum(")[0]
        is_product = outputs is not None and int(outputs[1]) > 1 and before_sum
        if is_product and re.search(r"\.(tanh|rsqrt|exp|sigmoid)\(", before_sum):
            found.append(name)
    return found


def find_kernels(code):
    return re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', ", code, re.DOTALL)


_compiled = {}


def compile_kernels(code):
    """Compile Triton's kernels in the code of a graph, and return the shared memory of each."""
    from torch._inductor.async_compile import _load_triton_kernel_from_source
    from torch._inductor.runtime import triton_helpers

    shared = {}
    with mock.patch.object(triton_helpers, "set_driver_to_gpu"):
        for name, source in find_kernels(code):
            body = source.replace(name, "")
            if body not in _compiled:
                kernel = _load_triton_kernel_from_source(name, source)
                result = kernel._precompile_config(kernel.configs[0])
                facts = getattr(result.kernel, "metadata", result.kernel)
                _compiled[body] = facts.shared
            shared[name] = _compiled[body]
    return shared


def lower_training(config, *, has_autocast=True, **options):
    import torch

    from kvlab.model import GPT
    from kvlab.spec import ModelConfig

    model = GPT(ModelConfig(**GPT2 | config), device="cuda")
    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64, device="cuda")
    model.prepare_positions(TOKENS)
    torch.compiler.reset()
    with torch.autocast("cuda", torch.bfloat16, enabled=has_autocast):
        torch.compile(model.hidden_states, fullgraph=True)(tokens, **options)


def lower_decoding(config, **serving):
    import torch

    from kvlab.model import GPT
    from kvlab.model.generate import StaticDecoder
    from kvlab.spec import ModelConfig, ServingConfig

    torch.set_default_dtype(torch.bfloat16)
    model = GPT(ModelConfig(**GPT2 | config), device="cuda").eval()
    torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        cache = model.new_cache(1, TOKENS, ServingConfig(compile=True, **serving))
        StaticDecoder(model, cache, compiles=True).compute(TOKENS)


CASES = {
    "rope": partial(lower_training, {"n_layer": 2}),
    "learned": partial(lower_training, {"n_layer": 2, "position": "learned"}),
    "float32 gqa": partial(lower_training, {"n_layer": 2, "n_kv_head": 4}, has_autocast=False),
    "windows": partial(lower_training, {"n_layer": 3, "attention_pattern": "GLL", "window": 256}),
    "documents": partial(lower_training, {"n_layer": 2, "sink": "learned"}, document_start=0),
    "decode xl": partial(lower_decoding, {"n_layer": 2, **XL}),
    "decode int8": partial(lower_decoding, {"n_layer": 2}, kv_dtype="int8"),
    "decode reduced": partial(lower_decoding, {"n_layer": 4, **GATED, **REDUCED}, kv_dtype="fp8"),
}


def main():
    ctypes.CDLL(sys.argv[1])
    for name in sys.argv[2:] or CASES:
        with lowering_for_cuda() as graphs, contextlib.suppress(Lowered):
            CASES[name]()
        print(json.dumps({"case": name, "graphs": graphs}), flush=True)
