"""What torch.compile makes of models for a CUDA device, without one: GPT-2's width, for an H100."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from filelock import FileLock

from kvlab.layout.training_memory import _MARGIN, activation_bytes
from kvlab.spec import Experiment
from kvlab.spec.flops import matrix_weights
from tests.studies import cuda_lowering as lowering

pytestmark = [
    pytest.mark.cuda_code,
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="torch has CUDA of its own; see `make gpu`"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
]
TRAINED = ["rope", "learned", "float32 gqa", "windows", "documents"]
DECODED = ["decode xl", "decode int8", "decode reduced"]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory, worker_id):
    """The facts of each case's graphs, from a process of their own, once for all test processes."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder if worker_id == "master" else folder.parent
    path = folder / "lowered.jsonl"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
            caches = {name: str(folder / cache) for name, cache in caches.items()}
            study = [sys.executable, "-m", "tests.studies", "cuda_lowering"]
            command = [*study, lowering.build_library(folder)]
            done = subprocess.run(
                command, env={**os.environ, **caches}, check=True, capture_output=True, text=True
            )
            path.write_text(done.stdout)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["case"]: line["graphs"] for line in lines}


def count_operators(facts, part):
    return sum(count for name, count in facts["operators"].items() if part in name)


def count_kernels(facts):
    return sum(facts["kernels"].values())


def count_templates(facts, part):
    """Kernels that are written for an operation, which others may be fused into."""
    return sum(n for name, n in facts["kernels"].items() if "_tem_" in name and part in name)


@pytest.mark.parametrize("case", [*TRAINED, *DECODED])
def test_a_step_is_one_graph_each_way_of_kernels_that_fit_a_processor(graphs, case):
    """Nothing is float64 or waits for the host. Rotary tables are made before, so no kernel
    computes a cosine."""
    graphs_of_step = [False, True] if case in TRAINED else [False]
    assert [facts["is_backward"] for facts in graphs[case]] == graphs_of_step
    for facts in graphs[case]:
        assert set(facts["kernels"]) <= set(facts["shared"])
        assert max(facts["shared"].values()) <= lowering.H100["shared_memory_per_block_optin"]
        assert not facts["has_float64"]
        assert not facts["has_trigonometry"]
        assert not facts["waits_for_host"]


def test_rotary_positions_cost_one_kernel_a_layer(graphs):
    """Forward: as many as an embedding of positions, in two layers. Backward none, and nothing is
    moved for them: the kernel that joins the gradients of Q, K and V rotates them."""
    for rotary, learned in zip(graphs["rope"], graphs["learned"], strict=True):
        assert rotary["operators"] == learned["operators"]
        assert count_kernels(rotary) <= count_kernels(learned)
    assert graphs["rope"][1]["moved_bytes"] < graphs["learned"][1]["moved_bytes"]


def test_shared_heads_in_float32_do_not_take_the_math_kernel(graphs):
    forward, backward = graphs["float32 gqa"]
    assert count_operators(forward, "efficient_attention") == 2
    assert count_operators(backward, "efficient_attention_backward") == 2
    scores = lowering.ROWS * 12 * lowering.TOKENS**2
    assert max(forward["allocated"], backward["allocated"]) < scores


@pytest.mark.parametrize("case", ["windows", "documents"])
def test_windows_documents_and_sinks_are_fused_kernels(graphs, case):
    """The mask of their blocks is made once a pass, for all layers that have it. The case of
    documents has sinks, too."""
    forward, backward = graphs[case]
    assert count_templates(forward, "flex_attention") == 2
    assert count_templates(backward, "flex_attention_backward") == 2
    assert count_operators(forward, "flash") == (1 if case == "windows" else 0)
    assert count_operators(forward, "sort") == 4, (
        "of its queries and keys, of blocks seen whole and in part"
    )
    scores = lowering.ROWS * 12 * lowering.TOKENS**2
    assert max(forward["allocated"], backward["allocated"]) < scores


@pytest.mark.parametrize("case", DECODED)
def test_a_step_reads_the_cache_by_one_kernel_a_layer(graphs, case):
    """It reads codes as they are stored: nothing as large as a layer's K is made of them. Norms and
    activations are computed once, not again in each block of the product that reads them."""
    [facts] = graphs[case]
    layers = 4 if case == "decode reduced" else 2
    assert facts["operators"]["torch.ops.kvlab.attend_stored.default"] == layers
    assert not count_operators(facts, "extern_kernels"), (
        "a product of one row is a kernel of its own"
    )
    assert not facts["recomputing"]
    assert count_kernels(facts) <= 9 * layers + 3
    assert facts["allocated"] <= lowering.GPT2["vocab_size"], "the logits"


@pytest.mark.parametrize("case", ["rope", "learned"])
def test_what_training_keeps_is_what_the_plan_expects(graphs, case):
    forward = graphs[case][0]
    training = {"tokens": 8192, "batch_tokens": 8192, "precision": "bfloat16"}
    model = {**lowering.GPT2, **lowering.CASES[case].args[0]}
    experiment = Experiment.model_validate({"name": "x", "model": model, "training": training})
    model = experiment.model
    weights = matrix_weights(model) - model.vocab_size * model.n_embd
    kept = forward["kept_bytes"] - 2 * weights  # those are kept in bfloat16 besides
    expected = activation_bytes(experiment) / _MARGIN * lowering.ROWS * lowering.TOKENS
    assert 0.7 < kept / expected < 1.3
