"""Gated DeltaNet as a layer kind: the contract of mixers, and a plain loop as reference."""

import random
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.evaluate.scoring import score_pairs
from kvlab.extensions.linear_attention.delta_rule import mix_chunks, mix_token
from kvlab.layout import KVLayout
from kvlab.model import GPT
from kvlab.spec import ModelConfig, ServingConfig, load_experiment
from kvlab.spec.experiment import ServedModel
from kvlab.train.loop import train
from tests.contracts.mixer_contract import MixerContract
from tests.extensions.linear_attention.reference import DeltaReference, run_rule
from tests.studies.fuzz_model import TOLERANCE, draw_case, run_case
from tests.support import tiny_training
from tests.support.extensions import needs
from tests.support.random_model import random_model

CASES = 24


class TestGatedDelta(MixerContract):
    name = "gated_delta"


def test_a_layers_settings_are_read_again_from_a_record():
    kinds = {"D": {"mixer": "gated_delta"}}
    model = ModelConfig(n_layer=2, n_head=2, n_embd=16, attention_pattern="DG", kinds=kinds)
    assert ModelConfig.model_validate_json(model.model_dump_json()) == model


def draw_tokens(generator, batch, states, group, length, size, fastest):
    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = draw(batch, states, group, length, size), *draw(2, batch, states, length, size)
    k = k / k.norm(dim=-1, keepdim=True)
    log_decay = -fastest * torch.rand(batch, states, length, generator=generator).double()
    return q, k, v, log_decay, draw(batch, states, length).sigmoid()


@settings(max_examples=40)
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 40), st.integers(1, 5),
    st.sampled_from([0.01, 1.0, 1000.0]), st.integers(1, 17), st.integers(0, 4), st.integers(0, 99),
)  # fmt: skip
def test_chunks_equal_the_recurrence(
    batch, states, group, length, size, fastest, chunk, documents, seed
):
    generator = torch.Generator().manual_seed(seed)
    tokens = draw_tokens(generator, batch, states, group, length, size, fastest)
    starts = torch.randint(0, length, (batch, documents), generator=generator)
    is_start = torch.zeros(batch, length, dtype=torch.bool).scatter(1, starts, True)
    ids = is_start.long().cumsum(1) if documents else None
    state = None
    if not documents:
        state = torch.randn(batch, states, size, size, generator=generator, dtype=torch.float64)
    read, after = mix_chunks(*tokens, state, ids, chunk=chunk)
    for row in range(batch):
        for head in range(states):
            q, k, v, log_decay, rate = (part[row, head].numpy() for part in tokens)
            own = np.zeros((size, size)) if state is None else state[row, head].T.numpy()
            edges = [0, *(is_start[row].nonzero().flatten().tolist() if documents else []), length]
            for start, end in pairwise(edges):
                if start and start == end:
                    continue
                own = np.zeros_like(own) if documents else own
                one = slice(start, end)
                out, own = run_rule(
                    q[:, one].swapaxes(0, 1), k[one], v[one], log_decay[one], rate[one], own
                )
                if len(out):
                    got = read[row, head, :, one].transpose(0, 1).numpy()
                    assert abs(got - out).max() < 1e-10
            assert abs(after[row, head].T.numpy() - own).max() < 1e-10
    if state is not None:
        first = tuple(part[..., :1, :] for part in tokens[:3]) + tuple(
            part[..., :1] for part in tokens[3:]
        )
        for one, other in zip(mix_token(*first, state), mix_chunks(*first, state), strict=True):
            assert (one - other).abs().max() < 1e-12


def draw_hybrid(number):
    """Return a case of random layouts, chunks and rows of which some layers are D."""
    rng = random.Random(number)
    while True:
        case = draw_case(rng.randrange(10**6))
        model = case.config.model_dump()
        letters = [rng.choice([one, "D", "D"]) for one in case.config.layer_kinds]
        pattern = "".join(letters)
        kinds = {one: own for one, own in case.config.kinds.items() if one in pattern}
        if rng.random() < 0.5:
            heads = [n for n in (1, 2, 3, 6) if case.config.n_head % n == 0]
            kinds["D"] = {"mixer": "gated_delta", "head_dim": rng.choice([3, 4, 8])}
            kinds["D"]["n_kv_head"] = rng.choice(heads)
        model |= {"attention_pattern": pattern, "kinds": kinds}
        for key, letter in (("window", "L"), ("local", "L"), ("global", "G")):
            model[key] = model[key] if letter in pattern else None
        if rng.random() < 0.5:
            model["kv_sharing"] = "none"
        try:
            config = ModelConfig(**model)
            ServedModel(name="case", model=config, serving=case.serving)
        except ValueError:
            continue
        if "D" in pattern:
            # as after a sandwich norm, a norm of what is read may divide rounding by next to nothing
            return replace(case, config=config, dtype=torch.float64)


@pytest.mark.parametrize("part", range(3))
def test_random_layouts_with_these_layers_agree_with_the_reference(part):
    for number in range(part, CASES, 3):
        case = draw_hybrid(number)
        assert run_case(case, make_reference=DeltaReference) <= TOLERANCE[case.dtype], case


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_many_more_random_layouts_agree_with_the_reference():
    for number in range(CASES, 600):
        case = draw_hybrid(number)
        assert run_case(case, make_reference=DeltaReference) <= TOLERANCE[case.dtype], case


def test_a_head_that_forgets_at_once_gives_finite_numbers_and_gradients():
    generator = torch.Generator().manual_seed(0)
    tokens = [part.float() for part in draw_tokens(generator, 1, 2, 1, 130, 4, 1e6)]
    for part in tokens:
        part.requires_grad_()
    mix_chunks(*tokens)[0].square().sum().backward()
    assert all(part.grad.isfinite().all() for part in tokens)


@pytest.mark.parametrize("serving", [{}, {"kv_dtype": "int8"}], ids=str)
def test_endings_of_one_context_are_scored_one_shot_and_served(serving):
    """As HellaSwag does: every ending goes on from the state of the context, not of another."""
    config = ModelConfig(
        vocab_size=60, block_size=64, n_layer=3, n_head=2, n_embd=16, attention_pattern="DDG"
    )
    model, rng = random_model(config, dtype=torch.float32).eval(), random.Random(3)
    model.requires_grad_(False)
    words = lambda count: [rng.randrange(60) for _ in range(count)]  # noqa: E731
    contexts = [words(n) for n in (7, 20, 1)]
    pairs = [(context, words(n)) for context in contexts for n in (1, 5, 2, 9)]
    served = score_pairs(model, pairs, ServingConfig(**serving))
    for (context, ending), one, other in zip(pairs, score_pairs(model, pairs), served, strict=True):
        logits = model(torch.tensor([context + ending[:-1]]))[0, len(context) - 1 :]
        losses = logits.log_softmax(-1)[range(len(ending)), ending].sum()
        assert one.nats == pytest.approx(-float(losses), abs=1e-4)
        assert other.nats == pytest.approx(one.nats, abs=0.3 if serving else 1e-4)


def test_heads_that_share_a_state_start_as_heads_that_do_not():
    """Parameters are drawn by name, so that trials of one seed are paired."""
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 9, "attention_pattern": "DG"}
    one, other = (GPT(ModelConfig(**shape, n_kv_head=n), seed=3) for n in (4, 1))
    for name in ("q.weight", "gate.weight", "proj.weight", "norm.weight"):
        own = f"blocks.0.attention.{name}"
        assert torch.equal(one.get_parameter(own), other.get_parameter(own))
    steps = torch.nn.functional.softplus(one.get_parameter("blocks.0.attention.offset"))
    assert ((steps > 0.001) & (steps < 0.1)).all()


@pytest.mark.parametrize(
    ("pattern", "training"),
    [
        ("D", {}),
        ("DDGG", {"precision": "bfloat16"}),
        pytest.param(
            "DDGG", {"kv_routing": {"share": 1.0}, "kv_dtype": "int8"}, marks=needs("kv_routing")
        ),
        pytest.param("DDGG", {"optimizer": "muon"}, marks=needs("muon")),
    ],
)
def test_a_training_lowers_the_loss(tmp_path, pattern, training):
    model = {"attention_pattern": pattern, "n_layer": len(pattern)}
    of = tiny_training.experiment(model, training)
    trained = tiny_training.model(of)
    record = train(trained, tiny_training.dataset(), of, seed=0, directory=tmp_path)
    losses = [point[-1] for point in record.validation_curve]
    assert losses[-1] < losses[0] - 0.5


ROOT = Path(__file__).parents[3]
EXPERIMENT = ROOT / "experiments" / "hybrid.yaml"


def test_the_shipped_experiment_and_the_page_are_planned():
    experiment = load_experiment(EXPERIMENT)
    layout = KVLayout.of(experiment.model, experiment.serving)
    state, token = 4 * 16 * 16 * 4, 2 * 4 * 16 * 4
    for context in (1, 100, 10**6):
        assert layout.stored_bytes(1, context) == 3 * state + context * token
    assert "3 D slots) x (4 x 16 x 16 x 4 bytes of state)" in layout.formula(1, 8)
    page = (ROOT / "kvlab/extensions/linear_attention/README.md").read_text()
    own = re.search(r"`kinds: (\{D: .*?\}\})`", page).group(1)
    changes = {"model.kinds": yaml.safe_load(own), "model.attention_pattern": "DDDG"}
    model = load_experiment(EXPERIMENT, changes).model
    assert model.layers[0].n_kv_head == 1
    assert KVLayout.of(model).plans[0].stored_bytes(5, "float32") == 4 * 32 * 32


def test_it_is_planned_without_torch():
    program = (
        "import sys; from kvlab.spec import load_experiment; from kvlab.layout import KVLayout\n"
        "model = load_experiment(sys.argv[1]).model\n"
        "print(KVLayout.of(model).stored_bytes(1, 9), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(EXPERIMENT)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert shown.stdout.split() == ["16896", "False"]
