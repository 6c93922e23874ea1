"""Experiments: defaults, presets, and errors with place, value, rule and hint."""

import pytest

from kvlab.errors import SpecError
from kvlab.spec import ModelConfig, load_experiment, load_served_model, parse_override
from tests.support.spec_files import EXPERIMENT, experiment_errors, write_spec


def test_a_good_file_is_filled_in(tmp_path):
    experiment = load_experiment(write_spec(tmp_path, EXPERIMENT))
    assert experiment.training.steps == 39
    assert experiment.training.final_learning_rate == pytest.approx(6e-5)
    assert (experiment.model.n_kv_head, experiment.model.head_dim) == (4, 16)
    assert experiment.model.ffn_dim == 256


def test_keys_beside_a_preset_win():
    model = ModelConfig(preset="llama-7b", n_kv_head=8)
    assert (model.n_layer, model.n_kv_head, model.ffn_dim) == (32, 8, 11008)
    assert ModelConfig(mlp="swiglu", n_embd=768).ffn_dim == 2048


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n_layer: 6", "n_layers: 6", "2:9: model.n_layers is not a known key; did you mean n_layer?"),
        ("n_layer: 6", "n_layer: six", "2:18: model.n_layer = six is not a whole number"),
        ("n_layer: 6", "n_layer: 6.5", "2:18: model.n_layer = 6.5 is not a whole number"),
        ("n_layer: 6", "n_layer: true", "2:18: model.n_layer = true is not a whole number"),
        ("n_layer: 6", "n_layer: '6'", "2:18: model.n_layer = 6 is not a whole number"),
        ("n_layer: 6", "n_layer: 0", "2:18: model.n_layer = 0 is below 1; use 1 or more"),
        ("n_layer: 6", "n_layer: 6, n_kv_head: 3",
         "2:32: model.n_kv_head = 3 does not divide n_head = 4; use 1, 2 or 4"),
        ("n_embd: 64", "n_embd: 63", "model.n_embd = 63 is not a multiple of n_head = 4"),
        ("n_layer: 6", "n_layer: 6, window: 8", "model.window = 8 needs local layers"),
        ("n_layer: 6", "n_layer: 6, attention_pattern: GL",
         "model.attention_pattern = GL has local layers (L) but no window"),
        ("n_layer: 6", "n_layer: 6, attention_pattern: GX", "may hold only G (global), L (local) and letters of model.kinds; define X"),
        ("n_layer: 6", "n_layer: 6, kv_sharing: 'adjacent:x'",
         "model.kv_sharing = adjacent:x needs a whole number"),
        ("n_layer: 6", "n_layer: 6, kv_sharing: {a: 1}", "model.kv_sharing = {...} is not a pattern"),
        ("n_layer: 6", "n_layer: 6, kv_sharing: [1, 1, 2, 3, 4, 5]", "layer 0 read layer 1"),
        ("n_layer: 6", "n_layer: 6, attention_pattern: GL, window: 4, kv_sharing: [[0, 1]]",
         "joins global layer 0 and local layer 1"),
        ("n_layer: 6", "n_layer: 6, norm: batchnorm",
         "model.norm = batchnorm is not one of layernorm, rmsnorm"),
        ("n_layer: 6", "n_layer: 6, norm: rmsnrm", "did you mean rmsnorm?"),
        ("training: {", "training: {int8: [output, grad_inputs], ", "training.int8.1 = grad_inputs is"
         " not one of output, grad_input, grad_weight; did you mean grad_input?"),
        ("training: {", "training: {int8: [output, output], ", "names a product twice; name each once"),
        ("training: {", "training: {residual: bfloat16, ", "training.residual = bfloat16 is read only under precision: bfloat16"),
        ("training: {", "training: {int8: output, ", "training.int8 = output is not a list"),
        ("n_layer: 6", "preset: gpt-2", "2:17: model.preset = gpt-2 is not a preset; did you mean gpt2?"),
        ("n_embd: 64", "n_embd: 68, position: rope", "model.head_dim is odd (n_embd / n_head): 17; rope rotates pairs"),
        ("vocab_size: 300", "vocab_size: 200", "vocab_size = 200 is smaller than the 257 tokens"),
        ("tokenizer: bytes", "tokenizer: 'gpt2:9'", "3:19: data.tokenizer = gpt2:9 keeps too few"),
        ("tokenizer: bytes", "tokenizer: bpe", "data.tokenizer = bpe is not a tokenizer"),
        ("tokenizer: bytes", "source: files", "data.source = files needs data.paths"),
        ("tokenizer: bytes", "source: docstring", "data.source = docstring is not one of docstrings, files,"),
        ("tokenizer: bytes", "source: fineweb-edu-crawl", "needs data.subset; name a crawl"),
        ("tokenizer: bytes", "source: fineweb-edu-crawl, subset: x",
         "3:43: data.subset = x is not a crawl; use one such as CC-MAIN-2024-10"),
        ("tokenizer: bytes", "subset: CC-MAIN-2024-10",
         "is read only by source: fineweb-edu-crawl, not docstrings"),
        ("tokenizer: bytes", "licence: CC0", "is known for docstrings; set it only for source: files"),
        ("n_layer: 6", "n_layer: 6, position: rotary", "model.position = rotary is not one of learned, rope, none"),
        ("benchmark: {", "benchmark: {parts: [memory], ", "5:21: benchmark.parts.0 = memory is not one of limit, task"),
        ("tokenizer: bytes", "paths: [x.txt]", "is read only by source: files, not docstrings"),
        ("batch_tokens: 256", "batch_tokens: 200",
         "training.batch_tokens = 200 is not a multiple of block_size = 128; use 256"),
        ("tokens: 10e3", "tokens: 100", "training.tokens = 100 is less than one step"),
        ("tokens: 10e3", "tokens: -1", "training.tokens = -1 is below 0"),
        ("new_tokens: 32", "new_tokens: 320", "exceed block_size = 128; shorten one"),
        ("name: small", "name: ../../x", "1:7: name = ../../x is not a usable name"),
        ("name: small", "nam: small", "1:1: nam is not a known key; did you mean name?"),
        ("data: {tokenizer: bytes}", "data: bytes", "3:7: data = bytes is not a mapping"),
        ("data:", "evaluation: {hellaswag: some}\ndata:",
         "3:25: evaluation.hellaswag = some is not one of all, none, a whole number"),
        ("data:", "evaluation: {loss_tokens: 1000, loss_bytes: 1000}\ndata:",
         "evaluation.loss_bytes = 1000 and loss_tokens both say how much text is scored"),
        ("data:", "evaluation: {loss_bytes: 1000, served_tokens: 64}\ndata:",
         "3:47: evaluation.served_tokens = 64 counts tokens, and loss_bytes scores the same text"),
        ("data:", "evaluation: {loss_bytes: 1000, positions: true}\ndata:",
         "evaluation.positions = true is measured over as many tokens as the loss, which"
         " loss_bytes does not count; give loss_tokens in its place, or leave one out"),
        ("data:", "evaluation: {needle: {lengths: [64, 32]}}\ndata:",
         "3:32: evaluation.needle.lengths = [64, 32] does not increase; use [32, 64]"),
        ("data:", "evaluation: {needle: {lengths: [16]}}\ndata:",
         "evaluation.needle.lengths = [16] has a length that leaves too little text around the"
         " needle and its question; use 32 or more"),
        ("data:", "evaluation: {needle: {lengths: [64, 256]}}\ndata:",
         "evaluation.needle.lengths = [64, 256] exceeds block_size = 128, where learned positions"
         " end; use 128 or less"),
        ("data:", "evaluation: {needle: {lengths: [64], depths: [0, 1.5]}}\ndata:",
         "3:50: evaluation.needle.depths.1 = 1.5 is above 1.0; use 1.0 or less"),
        ("data:", "evaluation: {needle: {lengths: [64], depths: [0.5, 0.5]}}\ndata:",
         "does not increase; use [0.5]"),
        ("data:", "evaluation: {needle: {depths: [0]}}\ndata:", "evaluation.needle.lengths is missing"),
        ("data:", "resources: {gpus: 1.5}\ndata:", "resources.gpus = 1.5 is above 1 and not whole"),
        ("data:", "resources: {microbatch_tokens: 100}\ndata:", "must be a multiple of block_size"),
        ("data:", "serving: {tie: 'adjacent:2', kv_dtype: int3}\ndata:", "kv_dtype = int3 is not one of"),
        ("data:", "serving: {kv_dtype: int4, kv_group: 24}\ndata:", "serving.kv_group = 24 needs groups that divide head_dim = 16; use serving.kv_group: 4, 8 or 16"),
        ("data:", "serving: {kv_dtype: int4, kv_group: 1}\ndata:", "3:37: serving.kv_group = 1 is below 4; use 4 or more"),
        ("data:", "serving: {kv_dtype: kivi2}\ndata:", "3:21: serving.kv_dtype = kivi2 quantizes none of the 128 tokens that a layer sees, as the newest 128 to 159 stay as they are; use serving.kv_residual: 96 or less"),
        ("data:", "serving: {kv_dtype: kivi4, kv_residual: 8, kv_group: 12}\ndata:", "serving.kv_group = 12 needs groups that divide head_dim = 16; use serving.kv_group: 4, 8 or 16"),
        ("data:", "serving: {kv_dtype: int4, kv_residual: 8}\ndata:", "serving.kv_residual = 8 has no effect in kv_dtype int4, which stores every token alike; leave it out, or use kivi4 or kivi2"),
        ("tokens: 10e3", "kv_dtype: kivi2", "training.kv_dtype = kivi2 quantizes none of the 128 tokens that a layer sees, as the newest 128 to 159 stay as they are; use training.kv_residual: 96 or less"),
        ("tokens: 10e3", "kv_dtype: int4, kv_group: 24", "training.kv_group = 24 needs groups that divide head_dim = 16; use training.kv_group: 4, 8 or 16"),
        ("tokens: 10e3", "kv_residual: 8", "training.kv_residual = 8 has no effect in kv_dtype model, which stores every token alike"),
        ("tokens: 10e3", "kv_dtype: int3", "training.kv_dtype = int3 is not one of model, float32"),
        ("data:", "serving: {kv_group: 16}\ndata:", "kv_group = 16 has no scales to group in kv_dtype model; leave it out, or use int8, fp8, int4, kivi4 or kivi2"),
        ("data:", "serving: {evict: {by: recency}}\ndata:", "serving.evict.keep is missing; give keep or bytes"),
        ("data:", "serving: {evict: {keep: 8, bytes: 9, by: recency}}\ndata:", "3:25: serving.evict.keep = 8 and bytes are two budgets; give keep or bytes"),
        ("data:", "serving: {evict: {keep: 4, by: recency}}\ndata:", "3:25: serving.evict.keep = 4 has no place beside sinks = 4; use more, or lower them"),
        ("data:", "serving: {evict: {keep: 8, by: heavy_hitters, recent: 8}}\ndata:", "serving.evict.keep = 8 has no place beside sinks = 0 and recent = 8"),
        ("data:", "serving: {evict: {keep: 8, by: recency, recent: 4}}\ndata:", "serving.evict.recent = 4 is read only by: heavy_hitters"),
        ("data:", "serving: {evict: {bytes: 4000, by: recency}}\ndata:", "3:26: serving.evict.bytes = 4000 is enough to keep 1, which has no place beside sinks = 4"),
        ("data:", "serving: {kv_dtype: kivi2, kv_residual: 8, evict: {keep: 9, by: recency}}\ndata:", "cannot drop single tokens from the blocks of kv_dtype kivi2; use int4, int8 or fp8, or leave one out"),
        ("data:", "serving: {tie: 'adjacent:2', evict: {keep: 9, by: heavy_hitters}}\ndata:", "serving.evict.by = heavy_hitters would differ between the layers that share the slot of layer 0; use recency, or share no K/V"),
        ("data:", "serving: {evict: {keep: 40, by: snapkv}}\ndata:", "serving.evict.prompt is missing; by snapkv it is the tokens that are reduced to keep"),
        ("data:", "serving: {evict: {keep: 40, by: snapkv, prompt: 32}}\ndata:", "serving.evict.prompt = 32 has no token before its last 32, which vote; use more, or set recent"),
        ("data:", "serving: {evict: {keep: 32, by: snapkv, prompt: 64}}\ndata:", "serving.evict.keep = 32 has no place beside sinks = 0 and recent = 32"),
        ("data:", "serving: {evict: {keep: 40, by: snapkv, prompt: 128}}\ndata:", "serving.evict.prompt = 128 leaves no token of block_size = 128 to decode after it; use less"),
        ("data:", "serving: {evict: {keep: 40, by: snapkv, prompt: 64, pool: 4}}\ndata:", "serving.evict.pool = 4 is even, so it has no token in its middle; use 3 or 5"),
        ("data:", "serving: {evict: {keep: 40, by: recency, prompt: 64}}\ndata:", "serving.evict.prompt = 64 is read only by: snapkv; leave it out"),
        ("vocab_size: 300}", "vocab_size: 300, attention_pattern: L, window: 9}\nserving: {evict: {keep: 9}}", "serving.evict = {...} has no layer to act on: all have a window"),
        ("data:", "serving: {compile: true, kv_dtype: kivi2, kv_residual: 8}\ndata:", "3:20: serving.compile = true needs steps of fixed shapes, which kv_dtype kivi2 does not have; leave one of the two out"),
        ("data:", "serving: {compile: true, evict: {keep: 9, by: recency}}\ndata:", "serving.compile = true needs steps of fixed shapes, which serving.evict does not have"),
        ("data:", "serving: {tie: zigzag}\ndata:", "3:16: serving.tie = zigzag is not a known pattern"),
    ],
)  # fmt: skip
def test_refusals(tmp_path, old, new, message):
    errors = experiment_errors(tmp_path, EXPERIMENT.replace(old, new, 1))
    assert any(message in line and line.startswith("e.yaml:") for line in errors), errors


def test_a_default_that_follows_a_wrong_value_is_no_second_problem(tmp_path):
    text = EXPERIMENT.replace("n_head: 4", "n_head: four").replace("10e3", "many")
    assert [line.split(" ")[1] for line in experiment_errors(tmp_path, text)] == [
        "model.n_head",
        "training.tokens",
    ]


def test_null_stands_for_the_default_of_what_follows_from_other_values(tmp_path):
    written = "final_learning_rate: null, warmup_tokens: null, schedule: wsd, decay_tokens: null"
    text = EXPERIMENT.replace("tokens: 10e3", f"tokens: 10e3, {written}")
    training = load_experiment(write_spec(tmp_path, text)).training
    assert training.final_learning_rate == 6e-5
    assert (training.warmup_tokens, training.decay_tokens) == (400, 2000)


def test_several_problems_come_together_sorted(tmp_path):
    text = EXPERIMENT.replace("n_layer: 6", "n_layer: x").replace("batch_tokens", "batchtokens")
    lines = experiment_errors(tmp_path, text)
    assert [line.split(":")[1] for line in lines] == ["2", "4"]
    assert "did you mean batch_tokens?" in lines[1]


def test_a_missing_section_is_named(tmp_path):
    assert experiment_errors(tmp_path, "name: x\n") == ["e.yaml:1:1: model is missing; add it"]


def test_overrides_are_checked_and_named(tmp_path):
    path = write_spec(tmp_path, EXPERIMENT)
    assert load_experiment(path, {"model.n_kv_head": 1}).model.n_kv_head == 1
    with pytest.raises(SpecError, match=r"^model.n_kv_head=3: model.n_kv_head = 3 does not"):
        load_experiment(path, {"model.n_kv_head": 3})
    with pytest.raises(SpecError, match="did you mean n_head"):
        load_experiment(path, {"model.n_heads": 3})
    assert parse_override("model.kv_sharing=[[0, 1]]") == ("model.kv_sharing", [[0, 1]])
    with pytest.raises(SpecError, match="is not key=value"):
        parse_override("model.n_head")


def test_shapes_of_presets():
    assert load_served_model("gpt2").model.n_layer == 12
    with pytest.raises(SpecError, match="gpt4: is not a preset or a .yaml file"):
        load_served_model("gpt4")


def test_paths_are_relative_to_the_file_that_names_them(tmp_path):
    text = EXPERIMENT.replace(
        "{tokenizer: bytes}", "{tokenizer: bytes, source: files, paths: [a.txt]}"
    )
    experiment = load_experiment(write_spec(tmp_path, text))
    assert experiment.data.paths == (str(tmp_path / "a.txt"),)
    assert "paths" not in experiment.data.identity()


def test_specs_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        ModelConfig().n_layer = 3
