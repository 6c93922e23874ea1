"""Training reads what serving stores: the codes of the cache, each as its query would see it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.spec.dtypes import KVStorage
from tests.contracts.slot_contract import MODELS, check_gradients, check_one_pass, check_reads
from tests.support.reference_model import round_to_format

STORAGES = [KVStorage("int8"), KVStorage("fp8"), KVStorage("int4", 4), KVStorage("bfloat16")]


@settings(max_examples=20)
@given(
    model=st.sampled_from(MODELS),
    kv=st.sampled_from(STORAGES),
    length=st.integers(1, 40),
    rows=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_a_query_of_training_reads_bitwise_what_the_cache_decodes(
    model, kv, length, rows, dtype, seed
):
    check_reads(model, kv, length, rows, dtype, seed)


@pytest.mark.parametrize(
    ("model", "kv"),
    [
        *[(model, STORAGES[i % 4]) for i, model in enumerate(MODELS)],
        ({"attention_pattern": "GLL", "window": 9, "sink_tokens": 2}, KVStorage("int4", 4)),
    ],
    ids=str,
)
def test_one_pass_of_training_computes_what_is_served_token_by_token(model, kv):
    check_one_pass(model, kv)


@pytest.mark.parametrize("kv", [STORAGES[0], STORAGES[2]], ids=str)
@pytest.mark.parametrize("window", [None, 11])
def test_gradients_are_those_of_a_float64_model_of_the_scheme(kv, window):
    def seen_by(kv, _place, part, _index):
        return round_to_format(part, kv.dtype, kv.group)

    check_gradients(kv, window, seen_by)
