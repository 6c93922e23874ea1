"""Stochastic routing: draws, a routed step against a plain model, training, and what is refused."""

import hashlib
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cache import KVContext
from kvlab.data.batches import get_training_batch
from kvlab.extensions.kv_routing.routed_pass import KVRoutes
from kvlab.extensions.kv_routing.routing import KVRouting
from kvlab.layout import KVLayout
from kvlab.model import GPT
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.spec.dtypes import KVStorage
from kvlab.spec.kv_forms import MAPPED_FORMS, NAMED_FORMS
from kvlab.train.loop import train
from kvlab.train.train_step import TrainStepper
from kvlab.trial.fingerprint import fingerprint, training_identity
from tests.support.tiny_training import MODEL, dataset, experiment, model
from tests.train.test_checkpoint import check_resumed
from tests.train.test_distributed import check_two_workers

DATA = dataset()
DEEP = {"n_layer": 6, "position": "rope"}
ROUTED = {"kv_routing": {"share": 0.5}}


def config(**fields):
    return ModelConfig(**{**MODEL, **fields})


def reference_picks(share, counts, seed, step):
    """As the page says: of two words of the sha256, one says whether, the other which."""
    picks = []
    for layer, count in enumerate(counts):
        text = f"kv_routing:{seed}:{step}:{layer}"
        number = int(hashlib.sha256(text.encode()).hexdigest()[:32], 16).to_bytes(16, "big")
        whether = int.from_bytes(number[:8], "little") / 2**64
        which = int.from_bytes(number[8:], "little") / 2**64
        picks.append(1 + int(which * (count - 1)) if count > 1 and whether < share else 0)
    return tuple(picks)


class TestDraws:
    @given(st.floats(0, 1), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 24))
    def test_they_are_a_function_of_seed_step_and_layer(self, share, seed, step, layers):
        choices = tuple(tuple(range(layer + 1)) for layer in range(layers))
        drawn = KVRouting(share=share).draw_picks(choices, seed, step)
        assert drawn == reference_picks(share, range(1, layers + 1), seed, step)
        deeper = (*choices, (0, 1))
        assert KVRouting(share=share).draw_picks(deeper, seed, step)[:layers] == drawn

    @pytest.mark.parametrize(
        ("fields", "depth", "expected"),
        [
            ({"n_layer": 4}, "any", ((0,), (1, 0), (2, 0, 1), (3, 0, 1, 2))),
            ({"n_layer": 4}, "adjacent:2", ((0,), (1, 0), (2,), (3, 2))),
            ({"n_layer": 4}, [[1, 3]], ((0,), (1,), (2,), (3, 1))),
            (
                {"n_layer": 5, "attention_pattern": "GLL", "window": 4},
                "any",
                ((0,), (1,), (2, 1), (3, 0), (4, 1, 2)),
            ),
            # a trained consumer has no K/V of its own, so none reads them
            ({"n_layer": 4, "kv_sharing": "adjacent:2"}, "any", ((0,), (0,), (2, 0), (2, 0))),
            (
                {"n_layer": 6, "kv_sharing": "adjacent:2"},
                "adjacent:4",
                ((0,), (0,), (2, 0), (2, 0), (4,), (4,)),
            ),
        ],
    )
    def test_which_layers_may_be_read(self, fields, depth, expected):
        assert KVRouting(share=0.5, depth=depth).find_choices(config(**fields)) == expected


def draw_model(rng):
    """Return a random model's configuration and its routing."""
    kv = rng.choice([name for name in NAMED_FORMS if name in ("separate", "tied", "grouped_tied")])
    fields = {
        "n_layer": rng.randint(2, 5),
        "n_head": 4,
        "n_kv_head": rng.choice([1, 2, 4]),
        "n_embd": 32,
        "position": "rope" if kv == "grouped_tied" else rng.choice(["learned", "rope", "none"]),
        "kv": kv if rng.random() < 0.7 or not MAPPED_FORMS else {"latent": 8, "rotary": 4},
        "norm": rng.choice(["rmsnorm", "layernorm"]),
        "kv_sharing": rng.choice(["none", "none", "adjacent:2"]),
    }
    if isinstance(fields["kv"], dict):
        fields |= {"n_kv_head": 4, "position": "rope"}
    if rng.random() < 0.5:
        fields |= {"attention_pattern": rng.choice(["L", "GL", "GLL"]), "window": 5}
    elif fields["kv"] == "separate":
        fields["qk_norm"] = True
    return config(**fields)


def run_plain(net, tokens, picked):
    """The same model as anybody would write it: layers read the K/V of ``picked`` layers."""
    owned = {}

    class Plain:
        position_limit = end = tokens.shape[1]
        positions = torch.arange(tokens.shape[1])

        def writes_kv(self, layer):
            return net.config.kv_owners[layer] == layer

        def write_kv(self, layer, *parts):
            owned[layer] = parts

        def observe_queries(self, *_):
            pass

        def read_kv(self, layer):
            distance = self.positions[:, None] - self.positions[None]
            window = net.config.layers[layer].window or tokens.shape[1]
            is_seen = (distance >= 0) & (distance < window)
            mask = torch.zeros(is_seen.shape, dtype=net.dtype).masked_fill(~is_seen, -torch.inf)
            return KVContext(owned[picked[layer]], mask[None, None])

        def key_positions(self, _):
            return self.positions

        def end_layer(self, _):
            pass

        def finish(self):
            pass

    return net.run_pass(tokens, Plain())


@settings(max_examples=40)
@given(st.integers(0, 10**9))
def test_a_routed_step_is_that_of_a_plain_model_in_float64(number):
    rng = random.Random(number)
    of = draw_model(rng)
    choices = KVRouting(share=0.7).find_choices(of)
    picks = KVRouting(share=0.7).draw_picks(choices, number, 3)
    picked = [layers[pick] for layers, pick in zip(choices, picks, strict=True)]
    net = GPT(of, seed=number % 1000, dtype=torch.float64)
    tokens = torch.randint(0, of.vocab_size, (2, 13), generator=torch.Generator().manual_seed(1))
    grads = []
    routes = KVRoutes(choices, picks)
    for states in (
        run_plain(net, tokens, picked),
        net.hidden_states(tokens, reads=routes),
        net.hidden_states(tokens, reads=routes.for_compiler(net.device)),
    ):
        loss = F.cross_entropy(net.lm_head(states).flatten(0, 1), tokens.flatten())
        net.zero_grad()
        loss.backward()
        found = {name: p.grad for name, p in net.named_parameters()}
        grads.append((loss.item(), found))
    (plain_loss, plain), *others = grads
    for loss, found in others:
        assert abs(loss - plain_loss) < 1e-10
        for name, grad in found.items():
            assert grad is not None, f"{name}: an unread layer's gradient is zero, not missing"
            expected = torch.zeros_like(grad) if plain[name] is None else plain[name]
            assert (grad - expected).abs().max() < 1e-10, name


def test_all_layers_routed_by_a_pattern_are_what_the_owner_tie_serves():
    of = config(n_layer=4, position="rope")
    net = GPT(of, dtype=torch.float64)
    choices = KVRouting(share=1, depth="adjacent:2").find_choices(of)
    routes = KVRoutes(choices, KVRouting(share=1, depth="adjacent:2").draw_picks(choices, 0, 0))
    tokens = torch.arange(26).view(2, 13)
    with torch.no_grad():
        routed = net.hidden_states(tokens, reads=routes)
        serving = ServingConfig(tie="adjacent:2", tie_rule="owner")
        assert KVLayout.of(of, serving).slots != KVLayout.of(of).slots
        cache = net.new_cache(2, 13, serving)
        served = torch.cat([net.hidden_states(one, cache) for one in tokens.split(5, 1)], 1)
    assert (routed - served).abs().max() < 1e-10


@pytest.mark.parametrize("kv_dtype", ["model", "int8", "int4"])
def test_packed_documents_and_rounded_kv_are_routed_too(kv_dtype):
    of = config(n_layer=5, position="rope", attention_pattern="GLGLL", window=4)
    net = GPT(of, dtype=torch.float64)
    net.trained_kv = KVStorage(kv_dtype)
    choices = KVRouting(share=0.9).find_choices(of)
    picks = KVRouting(share=0.9).draw_picks(choices, 1, 0)
    assert any(picks)
    routes = KVRoutes(choices, picks)
    text = [7, 3, 9, 0, 5, 4, 4, 8, 0, 1, 2, 3, 6]  # documents begin with 0
    packed = torch.tensor([text])
    with torch.no_grad():
        whole = net.hidden_states(packed, document_start=0, reads=routes)
        selected = net.hidden_states(packed, document_start=0, reads=routes.for_compiler("cpu"))
        alone = [net.hidden_states(part, reads=routes) for part in packed.split([3, 5, 5], 1)]
        plain = net.hidden_states(packed, document_start=0)
    assert torch.equal(whole, selected)
    assert (whole - torch.cat(alone, 1)).abs().max() < 1e-10
    assert (whole - plain).abs().max() > 1e-3


class TestTraining:
    def test_share_0_is_bitwise_the_plain_training_with_its_id(self, tmp_path):
        plain, none = (experiment(DEEP, t) for t in ({}, {"kv_routing": {"share": 0}}))
        weights = []
        for number, of in enumerate((plain, none)):
            trained = model(of)
            train(trained, DATA, of, seed=0, directory=tmp_path / str(number))
            weights.append([*trained.parameters()])
        assert all(map(torch.equal, *weights))
        ids = [fingerprint(training_identity(of, "text", 0)) for of in (plain, none)]
        assert ids[0] == ids[1]

    def test_what_is_computed_enters_the_id_and_how_it_is_written_does_not(self):
        def identify(**routing):
            of = experiment({"n_layer": 4}, {"kv_routing": {"share": 0.5, **routing}})
            return fingerprint(training_identity(of, "text", 0))

        assert identify(depth="adjacent:2") == identify(depth=[[0, 1], [2, 3]])
        assert identify(depth="adjacent:2") == identify(depth=[0, 0, 2, 2])
        different = [
            identify(), identify(share=0.25), identify(depth="adjacent:2"),
            identify(depth="trailing:2"),
        ]  # fmt: skip
        assert len(set(different)) == 4

    def test_it_resumes_bitwise(self, tmp_path):
        check_resumed(tmp_path, {"model": DEEP, "training": ROUTED})

    def test_its_steps_draw_as_the_page_says(self):
        net, of = model(experiment(DEEP)), experiment(DEEP, ROUTED)
        stepper = TrainStepper(net, DATA, of, seed=2)
        for step in range(3):
            x, y = get_training_batch(DATA.train, seed=2, step=step, batch_size=4, block_size=16)
            picks = reference_picks(0.5, range(1, 7), 2, step)
            picked = [layer if pick == 0 else pick - 1 for layer, pick in enumerate(picks)]
            states = run_plain(net, torch.from_numpy(x), picked)
            loss = F.cross_entropy(net.lm_head(states).flatten(0, 1), torch.from_numpy(y).flatten())
            assert float(stepper.accumulate_gradient(step)) == pytest.approx(loss.item(), abs=1e-5)

    def test_two_workers_draw_as_one(self, tmp_path):
        """Also where norms of keys that no layer reads are parameters without another use."""
        shape = {"n_layer": 3, "position": "rope", "qk_norm": True}
        steps = {"tokens": 64 * 10, "evaluate_every": 5, **ROUTED}
        check_two_workers(tmp_path, shape, steps)

    def test_one_compiled_graph_takes_all_draws(self, monkeypatch):
        graphs = []

        def backend(graph, _inputs):
            graphs.append(graph)
            return graph.forward

        plain = TrainStepper(model(experiment(DEEP)), DATA, experiment(DEEP, ROUTED), seed=0)
        expected = [float(plain.accumulate_gradient(step)) for step in range(4)]
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        compiled = experiment(DEEP, {**ROUTED, "compile": True})
        stepper = TrainStepper(model(compiled), DATA, compiled, seed=0)
        stepper.loss.compiles = True
        found = []
        for step in range(4):
            found.append(float(stepper.accumulate_gradient(step)))
        assert found == pytest.approx(expected, abs=1e-5)
        assert len(set(expected)) == 4
        assert len(graphs) <= 2, "the pass and the head"
