"""`kvlab estimate`: the numbers that people come for, as text and as JSON."""

import json

import pytest

from tests.support.tiny_sweep import run_kvlab


def test_one_target_has_bytes_mb_and_mib():
    code, out, _ = run_kvlab("estimate", "gpt2", "--context", "1024")
    assert code == 0
    assert "75,497,472 bytes = 75.5 MB = 72.0 MiB" in out


def test_compare_adds_variants_of_the_first_target():
    words = ["--compare", "model.n_kv_head=1", "serving.tie=character-ai", "--json"]
    _, out, _ = run_kvlab("estimate", "gpt2", *words)
    assert [row["kv_bytes"] for row in json.loads(out)] == [75_497_472, 2_621_440]


@pytest.mark.parametrize(
    ("memory", "batch"), [("24GB", (24 * 10**9 - 497_759_232) // 75_497_472), ("1MB", 0)]
)
def test_the_largest_batch_beside_the_weights(memory, batch):
    _, out, _ = run_kvlab("estimate", "gpt2", "--memory", memory, "--json")
    assert json.loads(out)[0]["largest_batch"] == batch


def test_sizes_adds_other_contexts_batches_and_sizes():
    _, out, _ = run_kvlab(
        "estimate", "gpt2", "--set", "model.n_kv_head=1", "--dtype", "float16", "--sizes", "--json"
    )
    sizes = {(r["size"], r["context_length"]): r["kv_bytes"] for r in json.loads(out)[0]["sizes"]}
    assert sizes["gpt3-175b", 1024]["1"] == 50_331_648
    assert sizes["gpt2", 1024]["8"] == 8 * 6_291_456 // 2
