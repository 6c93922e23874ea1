"""A quantizer of a user's file stores K and V in caches and in trainings, to the byte."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.benchmark.measures.decode_memory import count_kv_bytes
from kvlab.cache.formats import QuantizerFormat
from kvlab.errors import SpecError, UsageError
from kvlab.layout import KVLayout
from kvlab.model import GPT
from kvlab.spec import Experiment, ModelConfig, ServingConfig, load_experiment
from kvlab.spec.dtypes import KVStorage
from kvlab.spec.extension_files import describe_error, load_extension, read_extension
from kvlab.spec.members import MemberError
from kvlab.trial.model_targets import OpenedModel, override_serving
from kvlab.trial.trial import Trial
from tests.contracts.slot_contract import (
    MODELS,
    SHAPE,
    check_copies_of_rows,
    check_gradients,
    check_one_pass,
    check_reads,
)
from tests.studies.fuzz_model import draw_case, run_case
from tests.support.random_model import random_model
from tests.support.reference_model import round_to_format

EXAMPLE = Path(__file__).parents[2] / "docs" / "extend" / "ternary.py"
(TERNARY,) = load_extension(read_extension(EXAMPLE)).members
GLOBAL = ModelConfig(**SHAPE)
SERVINGS = [TERNARY, {"k": "int8", "v": TERNARY}, {"k": TERNARY, "v": "model"}]
YAML = """\
name: mine
extensions: [mine.py]
model: {vocab_size: 257, block_size: 32, n_layer: 2, n_head: 2, n_embd: 16}
data: {tokenizer: bytes}
benchmark: {prompt_tokens: 8, new_tokens: 8}
serving: {kv_dtype: ternary}
"""


def write(folder, text=None, yaml=YAML):
    (folder / "mine.py").write_text(EXAMPLE.read_text() if text is None else text)
    (folder / "e.yaml").write_text(yaml)
    return folder / "e.yaml"


@settings(max_examples=12)
@given(number=st.integers(0, 10**6), kv_dtype=st.sampled_from(SERVINGS))
def test_logits_agree_with_the_reference(number, kv_dtype):
    case = draw_case(number)
    sizes = case.config.stored_sizes
    if not case.config.kv_form.stores_keys or any(size % 4 for size in sizes):
        return
    kept = {name: getattr(case.serving, name) for name in ("tie", "tie_rule", "kv_rotate")}
    serving = ServingConfig(kv_dtype=kv_dtype, **kept)
    assert run_case(replace(case, serving=serving, dtype=torch.float64)) < 1e-9


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_training_reads_what_the_cache_gives_back(model):
    kv = KVStorage(TERNARY)
    check_reads(model, kv, 20, 2, torch.float32, 0)
    check_one_pass(model, kv)


def test_gradients_pass_straight_through():
    def seen_by(kv, _place, part, _index):
        return round_to_format(part, str(kv.dtype))

    check_gradients(KVStorage(TERNARY), None, seen_by)


@pytest.mark.parametrize("kv_dtype", SERVINGS, ids=["both", "v", "k"])
def test_rows_go_on_apart_and_bytes_are_those_of_the_file(kv_dtype):
    config = GLOBAL
    serving = ServingConfig(kv_dtype=kv_dtype)
    check_copies_of_rows(config, serving)
    layer, size = config.layers[0], config.layers[0].head_dim
    taken = {"ternary": size // 4 + 2, "int8": size + 2, "float32": 4 * size}
    dtypes = KVLayout.of(config, serving).plans[0].list_dtypes("float32")
    token = layer.n_kv_head * sum(taken[str(one)] for one in dtypes)
    counted = count_kv_bytes(GPT(config), serving, 1, 30)
    assert set(counted.values()) == {config.n_layer * 30 * token}
    assert not random_model(config).new_cache(1, 8, serving).has_static_pass


def test_its_code_is_in_the_id_of_what_it_changes_alone(tmp_path):
    served = load_experiment(write(tmp_path))
    plain = load_experiment(tmp_path / "e.yaml", {"serving.kv_dtype": "model"})
    trained = load_experiment(tmp_path / "e.yaml", {"training.kv_dtype": "ternary"})
    edited = load_experiment(write(tmp_path, EXAMPLE.read_text().replace("6e4", "5e4")))
    both = load_experiment(tmp_path / "e.yaml", {"training.kv_dtype": "ternary"})
    ids = [Trial.of(one, "text", 0) for one in (plain, served, edited, trained, both)]
    assert len({one.id for one in ids}) == 5
    assert len({one.training_id for one in ids[:3]}) == 1
    assert len({one.training_id for one in ids[2:]}) == 3
    kept = served.model_dump(mode="json")
    assert kept["serving"]["kv_dtype"] == "ternary"
    assert Experiment.model_validate(kept) == load_experiment(write(tmp_path))


@pytest.mark.parametrize(
    ("serving", "problem"),
    [
        ("{kv_dtype: ternry}", "kv_dtype = ternry is not one of "),
        ("{kv_dtype: {k: ternary}}", "kv_dtype.v is missing"),
        ("{kv_dtype: ternary, kv_group: 8}", "kv_group = 8 has no scales to group in kv_dtype"),
        ("{kv_dtype: ternary, compile: true}", "compile = true needs steps of fixed shapes"),
        ("{kv_dtype: {ternary: {size: 2}}}", "kv_dtype = {...} is a map, and ternary takes no"),
    ],
)
def test_what_does_not_go_with_it_has_its_place(tmp_path, serving, problem):
    with pytest.raises(SpecError) as error:
        load_experiment(write(tmp_path, yaml=YAML.replace("{kv_dtype: ternary}", serving)))
    assert f"e.yaml:6:{error.value.problems[0].column}: serving.{problem}" in str(error.value)


def test_sizes_that_it_cannot_store_are_refused_in_its_words(tmp_path):
    with pytest.raises(SpecError, match=r"a head of 6 numbers: ternary needs a multiple of 4"):
        load_experiment(write(tmp_path), {"model.n_embd": 12})


def test_codes_other_than_those_declared_have_their_line(tmp_path):
    text = EXAMPLE.read_text().replace(".half()", "")
    serving = load_experiment(write(tmp_path, text)).serving
    cache = random_model(GLOBAL).new_cache(1, 8, serving)
    with pytest.raises(MemberError) as error, torch.inference_mode():
        random_model(GLOBAL)(torch.zeros(1, 2, dtype=torch.int64), cache=cache)
    assert describe_error(error.value).startswith(
        "mine.py:8: Ternary returns [((1, 2, 2, 2), torch.uint8), ((1"
    )


def test_a_trained_model_is_served_otherwise_by_its_own_file(tmp_path):
    experiment = load_experiment(write(tmp_path))
    opened = OpenedModel("x", GPT(experiment.model), experiment.serving, "bytes", experiment)
    served = override_serving(opened, {"serving.kv_dtype": {"k": "int8", "v": "ternary"}})
    assert [str(one) for one in (served.kv_dtype.k, served.kv_dtype.v)] == ["int8", "ternary"]
    with pytest.raises(UsageError, match="did you mean ternary"):
        override_serving(opened, {"serving.kv_dtype": "ternry"})


ROTATED = """\
import torch
from kvlab.extend import Extension, Quantizer

BASIS = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))[0]


class Rotated(Quantizer):
    name = "rotated"

    def stored(self, size):
        return ((size, "float32"),)

    def encode(self, values):
        return (values @ BASIS,)

    def decode(self, stored):
        return stored @ BASIS.T


extension = Extension(quantizers=(Rotated(),))
"""


def test_a_training_in_bfloat16_multiplies_its_vectors_in_float32(tmp_path):
    storage = QuantizerFormat(
        load_experiment(
            write(tmp_path, ROTATED, YAML.replace("ternary", "rotated"))
        ).serving.kv_dtype
    )
    vectors = torch.randn(2, 2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = storage.decode(storage.encode(vectors), torch.float32)
    assert torch.equal(rounded, storage.decode(storage.encode(vectors), torch.float32))
