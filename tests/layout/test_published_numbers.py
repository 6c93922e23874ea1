"""The exact integers that the articles and papers imply (their own figures are often rounded)."""

import pytest

from kvlab.layout import KVLayout, decode_flops, forward_flops, parameter_count
from kvlab.spec import ModelConfig, ServingConfig

TIED = ServingConfig(tie="character-ai")
HYBRID = {"window": 256, "attention_pattern": "GLLLLL"}


def stored(batch, context, dtype, serving=None, **model):
    return KVLayout.of(ModelConfig(**model), serving).stored_bytes(batch, context, dtype)


@pytest.mark.parametrize(
    ("expected", "batch", "context", "dtype", "serving", "model"),
    [
        (75_497_472, 1, 1024, "float32", None, {"preset": "gpt2"}),
        (2_359_296, 1, 1024, "float32", None, {"preset": "gpt2", "n_kv_head": 1, **HYBRID}),
        (1_048_576, 1, 1024, "float32", TIED, {"preset": "gpt2", "n_kv_head": 1, **HYBRID}),
        (50_331_648, 1, 1024, "float16", None, {"preset": "gpt3-175b", "n_kv_head": 1}),
        (614_400, 1, 1, "float32", None, {"preset": "gpt2-xl"}),
    ],
)
def test_kv_bytes(expected, batch, context, dtype, serving, model):
    assert stored(batch, context, dtype, serving, **model) == expected


@pytest.mark.parametrize(
    ("preset", "parameters", "token_bytes"),
    [  # of parameters, those of the published checkpoints; of bytes, see `kvlab/layout/README.md`
        ("gpt2", 124_439_808, 36_864),
        ("gpt2-medium", 354_823_168, 98_304),
        ("gpt2-large", 774_030_080, 184_320),
        ("gpt2-xl", 1_557_611_200, 307_200),
        ("llama-7b", 6_738_415_616, 524_288),
        ("llama-3-8b", 8_030_261_248, 131_072),
        ("llama-3-70b", 70_553_706_496, 327_680),
        ("llama-3-405b", 405_853_388_800, 516_096),
        ("llama-3.2-1b", 1_235_814_400, 32_768),
        ("llama-3.2-3b", 3_212_749_824, 114_688),
        ("qwen3-0.6b", 596_049_920, 114_688),
        ("qwen3-1.7b", 1_720_574_976, 114_688),
        ("qwen3-4b", 4_022_468_096, 147_456),
        ("qwen3-8b", 8_190_735_360, 147_456),
        ("qwen3-14b", 14_768_307_200, 163_840),
        ("qwen3-32b", 32_762_123_264, 262_144),
        ("gemma-3-1b", 999_885_952, 26_624),
    ],
)
def test_presets_have_the_published_parameters_and_bytes_of_a_token(
    preset, parameters, token_bytes
):
    model = ModelConfig(preset=preset)
    assert parameter_count(model) == parameters
    assert KVLayout.of(model).bytes_per_token("bfloat16") == token_bytes


@pytest.mark.parametrize(
    ("preset", "published", "token_bytes", "at_limit"),
    [  # the technical report of Gemma 3 (arXiv 2503.19786), table 1: parameters but embeddings
        ("gemma-3-1b", 698, 26 * 1024, 4 * 1024),
        ("gemma-3-4b", 3209, 34 * 4096, 5 * 4096),
        ("gemma-3-12b", 10_759, 48 * 8192, 8 * 8192),
        ("gemma-3-27b", 25_600, 62 * 8192, 10 * 8192),
    ],
)
def test_gemma_3_has_the_published_parameters(preset, published, token_bytes, at_limit):
    model = ModelConfig(preset=preset)
    parameters = parameter_count(model) - model.vocab_size * model.n_embd
    assert abs(parameters / 1e6 - published) < 1.5
    assert KVLayout.of(model).bytes_per_token("bfloat16") == token_bytes
    assert KVLayout.of(model).bytes_per_token_at_limit("bfloat16") == at_limit


def test_gpt_oss_has_the_published_parameters():
    """Of its model card (arXiv 2508.10925), table 1: active ones, without embeddings."""
    sizes = (("gpt-oss-20b", 3.61, 24, 32), ("gpt-oss-120b", 5.13, 36, 128))
    for preset, active, layers, experts in sizes:
        model = ModelConfig(preset=preset)
        parameters = parameter_count(model) - model.vocab_size * model.n_embd
        parameters += layers * experts * (model.n_embd + 1)  # the router
        assert abs(parameters / 1e9 - active) < 0.005
        assert KVLayout.of(model).bytes_per_token("bfloat16") == layers * 2048
        assert KVLayout.of(model).bytes_per_token_at_limit("bfloat16") == layers // 2 * 2048


KEEP_ENDS = [[2 * i + 1, 2 * i + 2] for i in range(9)]


@pytest.mark.parametrize(
    ("expected", "kv_heads", "head_dim", "sharing"),
    [
        (163_840, 16, 128, "none"), (40_960, 4, 128, "none"), (20_480, 2, 128, "none"),
        (10_240, 1, 128, "none"), (5_120, 1, 64, "none"), (5_120, 1, 128, "adjacent:2"),
        (3_600, 1, 90, "adjacent:2"), (3_584, 1, 128, "adjacent:3"), (2_560, 1, 128, "adjacent:4"),
        (5_632, 1, 128, KEEP_ENDS),
    ],
)  # fmt: skip
def test_bytes_per_token_of_cross_layer_attention_table_1(expected, kv_heads, head_dim, sharing):
    model = ModelConfig(
        n_layer=20, n_head=16, n_kv_head=kv_heads, n_embd=2048, head_dim=head_dim,
        position="rope", kv_sharing=sharing,
    )  # fmt: skip
    assert KVLayout.of(model).bytes_per_token("float16") == expected


def test_gpt2_xl_flops():
    model = ModelConfig(preset="gpt2-xl")
    for tokens in (1, 256, 1024):
        assert forward_flops(model, tokens) == 3_109_942_400 * tokens + 307_200 * tokens**2


def test_windows_bound_reads_and_growth_but_sharing_does_not_bound_reads():
    model = ModelConfig(preset="gpt2", n_kv_head=1, **HYBRID)
    plain, tied = KVLayout.of(model), KVLayout.of(model, TIED)
    token = 2 * 64 * 4
    assert plain.read_bytes(1, 1024) == tied.read_bytes(1, 1024) == token * (2 * 1024 + 10 * 256)
    assert plain.bytes_per_token_at_limit() == 2 * token
    assert tied.bytes_per_token_at_limit() == token
    growth = plain.stored_bytes(1, 5001) - plain.stored_bytes(1, 5000)
    assert growth == plain.bytes_per_token_at_limit()
    assert decode_flops(model, 1024) < decode_flops(ModelConfig(preset="gpt2", n_kv_head=1), 1024)


def test_written_bytes_follow_the_tie_rule_and_int8_counts_its_scales():
    model = ModelConfig(preset="gpt2", n_kv_head=1)
    owner = ServingConfig(tie="character-ai", tie_rule="owner")
    assert KVLayout.of(model, TIED).written_bytes(1) == 12 * 512
    assert KVLayout.of(model, owner).written_bytes(1) == 5 * 512
    layout = KVLayout.of(ModelConfig(preset="gpt2"), ServingConfig(kv_dtype="int8"))
    assert layout.stored_bytes(3, 100) == 3 * 100 * 12 * 2 * 12 * (64 + 2)
