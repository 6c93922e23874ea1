"""Tokenizers of checkpoints: ids are those of the library, and every text survives."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvlab.cli.main import main
from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.data.tokenizers import load_tokenizer
from kvlab.errors import DataError
from kvlab.extensions.published_weights.tokenizer import find_vocabulary
from kvlab.model import GPT
from kvlab.model.uptraining import initialize_from
from kvlab.spec import DataConfig, ModelConfig, load_sweep
from kvlab.store import Store
from kvlab.sweep import plan
from tests.support.extensions import needs
from tests.support.tiny_sweep import EXPERIMENT, WORDS, tiny_sweep_folder
from tests.support.trained_trial import make_random_model

tokenizers = pytest.importorskip("tokenizers", reason="the library of such files")

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=120)
SEPARATOR = "<|endoftext|>"
CORPUS = [
    " ".join(WORDS) * 3,
    "It came before, and it keeps 1234 values.\n\n  Ünïcode: 日本語 👍\n",
] * 20


def write_byte_level(folder, specials=(SEPARATOR,), **config):
    """Write a byte-level BPE as GPT-2, Llama 3 and Qwen have."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(specials), initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(CORPUS, trainer)
    return write(folder, made, **config)


def write_byte_fallback(folder, **config):
    """Write a BPE whose letters are characters, and bytes for all others, as Llama 2 and Gemma."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁atehk", "▁t",
             "▁th", "▁the"]  # fmt: skip
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = tokenizers.models.BPE(
        vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁"),
    ])  # fmt: skip
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return write(folder, made, **config)


def write(folder, made, **config):
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return write_byte_level(tmp_path_factory.mktemp("byte-level"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    return write_byte_fallback(tmp_path_factory.mktemp("fallback"), bos_token={"content": "<s>"})


@settings(max_examples=60)
@given(text=TEXT)
def test_byte_level_ids_are_those_of_the_library(byte_level, text):
    ours = load_tokenizer(byte_level)
    theirs = tokenizers.Tokenizer.from_file(f"{byte_level}/tokenizer.json")
    ids = ours.encode(text)
    if SEPARATOR not in text:
        assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode_array(np.array(ids, np.int64)) == text.encode()
    assert ours.token_bytes()[ids].sum() == len(text.encode())


@settings(max_examples=60)
@given(text=TEXT)
def test_byte_fallback_has_the_space_that_it_puts_first(byte_fallback, text):
    ours = load_tokenizer(byte_fallback)
    theirs = tokenizers.Tokenizer.from_file(f"{byte_fallback}/tokenizer.json")
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    text = text.replace("\u2581", " ")  # which such files cannot tell from a space
    assert ours.decode_array(np.array(ids, np.int64)) == (f" {text}".encode() if text else b"")
    assert ours.token_bytes()[ids].sum() == len(ours.decode_array(np.array(ids, np.int64)))


@pytest.mark.parametrize(
    ("specials", "config", "separator"),
    [
        ((SEPARATOR, "<s>"), {"bos_token": "<s>"}, SEPARATOR),
        (("<s>", "</s>"), {"bos_token": "<s>", "eos_token": "</s>"}, "<s>"),
        (("<s>", "</s>"), {"bos_token": None, "eos_token": "</s>"}, "</s>"),
    ],
)
def test_documents_are_separated_as_in_the_training(specials, config, separator, tmp_path):
    name = write_byte_level(tmp_path, specials, **config)
    size, end = find_vocabulary(name)
    ours = load_tokenizer(name)
    assert (ours.vocab_size, ours.end_of_text, end) == (size, specials.index(separator), end)
    assert end == ours.end_of_text
    assert ours.token_bytes()[end] == 0
    assert len(ours.encode(f"a{separator}b")) > 3, "text is no special token"
    assert (
        ours.decode([end, *ours.encode("a"), end, *ours.encode("b")]) == f"{SEPARATOR}a{SEPARATOR}b"
    )


def test_other_kinds_and_damaged_files_are_refused(tmp_path):
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    )
    cases = {"words": (made, "is no byte-level or byte-fallback BPE: model.type is WordLevel")}
    write_byte_level(tmp_path / "lower")
    lower = tokenizers.Tokenizer.from_file(str(tmp_path / "lower" / "tokenizer.json"))
    lower.normalizer = tokenizers.normalizers.Lowercase()
    cases["lower"] = lower, "changes text, so no loss can be of it"
    for name, (one, message) in cases.items():
        with pytest.raises(DataError, match=message):
            load_tokenizer(write(tmp_path / name, one))
    write_byte_level(tmp_path / "none", ())
    with pytest.raises(DataError, match="no token that separates documents; name bos_token"):
        load_tokenizer(str(tmp_path / "none"))
    facts = json.loads((tmp_path / "none" / "tokenizer.json").read_text())
    facts["model"]["vocab"]["far"] = 10**8
    (tmp_path / "none" / "tokenizer.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match="it has the id 100,000,000, and ids end at 10,000,000"):
        load_tokenizer(str(tmp_path / "none"))
    (tmp_path / "none" / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(DataError, match=r"tokenizer.json cannot be read: .*line 1"):
        load_tokenizer(str(tmp_path / "none"))
    (tmp_path / "none" / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}}}')
    with pytest.raises(DataError, match="is no byte-level or byte-fallback BPE"):
        load_tokenizer(str(tmp_path / "none"))
    (tmp_path / "none" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="has no tokenizer.json; name a checkpoint that has one"):
        load_tokenizer(str(tmp_path / "none"))


CHECKPOINT = """\
question: What does serving this checkpoint through less memory cost?
experiment: e.yaml
factors:
  serving:
    plain: {}
    int4: {serving.kv_dtype: int4}
seeds: 3
decide: {margin: 0.01}
report: {sections: [answer, effects]}
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A folder with a checkpoint, of which a sweep has served three texts."""
    with tiny_sweep_folder(tmp_path_factory.mktemp("checkpoint"), CHECKPOINT) as folder:
        write_byte_level(folder / "weights")
        shape = {"vocab_size": 300, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 8}
        model = make_random_model(ModelConfig(**shape))
        model.save_pretrained(folder / "weights")
        text = EXPERIMENT.replace("vocab_size: 257", "vocab_size: 300")
        text = text.replace("tokenizer: bytes", "tokenizer: ./weights")
        text = text.replace("tokens: 640,", "tokens: 0, init_from: weights,")
        text = text.replace("evaluation: {", "evaluation: {text_parts: 3, ")
        (folder / "e.yaml").write_text(text)
        assert main(["submit", "s.yaml", "--executor", "inline"]) == 0
        yield folder


def test_each_seed_scores_documents_of_its_own(study):
    store, planned = Store(study / "runs"), plan(load_sweep(study / "s.yaml"), None)
    model = GPT.from_pretrained(study / "weights").eval()
    held_out = prepare_dataset(planned.trials[0].trial.experiment.data).validation
    separator = find_vocabulary(str(study / "weights"))[1]
    starts = np.flatnonzero(held_out == separator)
    ideal = [part * len(held_out) / 3 for part in (1, 2)]
    cuts = [0, *(starts[np.abs(starts - one).argmin()] for one in ideal), len(held_out)]
    losses = {}
    for one in planned.trials:
        result = store.result(one.trial.id)
        losses[one.levels["serving"], one.trial.seed] = result["measurements"]["loss"]
        assert result["provenance"]["data"]["tokenizer"].startswith("tokenizer.json ")
        assert result["experiment"]["data"]["tokenizer"] == "./weights"
        assert str(study) not in json.dumps(result)
    for seed in range(3):
        own = held_out[cuts[seed] : cuts[seed + 1]].astype(np.int64)
        windows = np.arange(4) * ((len(own) - 1) // 16) // 4 * 16
        rows = torch.tensor(np.stack([own[first : first + 17] for first in windows]))
        with torch.inference_mode():
            logits = model(rows[:, :-1])
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        for serving in ("plain", "int4"):
            assert losses[serving, seed] == pytest.approx(expected.item(), abs=1e-5)
    assert len({round(loss, 6) for loss in losses.values()}) == 3
    page = (study / "reports" / "s" / "report.md").read_text()
    assert "Each seed scores held-out documents of its own" in page


def test_seeds_without_a_text_of_their_own_are_refused(study, capsys):
    (study / "four.yaml").write_text(CHECKPOINT.replace("seeds: 3", "seeds: 4"))
    assert main(["plan", "four.yaml"]) == 2
    text = "e.yaml:5:26: evaluation.text_parts = 3 has no part for seed 3; use 4 or more"
    assert text in capsys.readouterr().err
    experiment = (study / "e.yaml").read_text().replace("text_parts: 3, ", "")
    (study / "one-text.yaml").write_text(experiment)
    (study / "same.yaml").write_text(CHECKPOINT.replace("e.yaml", "one-text.yaml"))
    assert main(["plan", "same.yaml"]) == 2
    text = "training.tokens = 0 trains nothing, so all seeds measure the same; give one seed, or"
    assert f"{text} evaluation.text_parts" in capsys.readouterr().err


def test_the_place_of_a_tokenizer_does_not_count_and_its_content_does(study, tmp_path):
    first = DataConfig(source="docstrings", tokenizer=str(study / "weights"))
    (tmp_path / "moved").mkdir()
    copy = tmp_path / "moved" / "tokenizer.json"
    copy.write_bytes((study / "weights" / "tokenizer.json").read_bytes())
    second = DataConfig(source="docstrings", tokenizer=str(tmp_path / "moved"))
    assert first.identity() == second.identity()
    copy.write_text(copy.read_text() + "\n")
    assert first.identity() != second.identity()
    assert (
        DataConfig(tokenizer="nobody/has-this").identity()["tokenizer"] == "absent nobody/has-this"
    )


def test_a_preset_is_the_shape_of_a_checkpoint(study):
    shape = ModelConfig.model_validate({"preset": str(study / "weights")})
    assert shape == GPT.from_pretrained(study / "weights").config
    own = ModelConfig.model_validate({"preset": str(study / "weights"), "block_size": 8})
    assert own == shape.model_copy(update={"block_size": 8})
    with pytest.raises(ValidationError, match=r"has no model: .*nothing is not a folder"):
        ModelConfig.model_validate({"preset": str(study / "nothing")})


def test_settings_that_are_not_the_checkpoints_are_named(study):
    source = GPT.from_pretrained(study / "weights")
    tensors = dict(source.named_parameters())
    assert not initialize_from(GPT(source.config), source.config, tensors).changed
    rotated = GPT(source.config.model_copy(update={"position": "rope", "norm_eps": 2e-5}))
    changed = initialize_from(rotated, source.config, tensors).changed
    assert changed["norm_eps"] == "2e-05, not 1e-05"
    assert changed["position"] == "rope, not learned"


def test_a_report_names_settings_that_the_checkpoint_did_not_have(study):
    level = "near: {model.window: 8, model.attention_pattern: LL}"
    text = CHECKPOINT.replace("int4: {serving.kv_dtype: int4}", level)
    text = text.replace("seeds: 3", "seeds: 1").replace("[answer, effects]", "[starts]")
    (study / "windows.yaml").write_text(text)
    assert main(["submit", "windows.yaml", "--executor", "inline"]) == 0
    page = (study / "reports" / "windows" / "report.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| near"))
    assert "kinds LL, not GG; window 8, not None" in row


@needs("generate")
def test_a_checkpoint_continues_text_by_its_tokenizer_or_a_named_one(study, tmp_path, capsys):
    words = ["generate", str(study / "weights"), "--prompt", "the cache", "--new-tokens", "3"]
    assert main([*words, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    ours = load_tokenizer(str(study / "weights"))
    assert row["prompt_ids"] == ours.encode("the cache")
    assert row["text"] == ours.decode(row["new_ids"])
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(study / "weights" / name)
    words[1] = str(tmp_path)
    assert main(words) == 2
    assert "name one with --tokenizer" in capsys.readouterr().err
    assert main([*words, "--json", "--tokenizer", str(study / "weights")]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [row]
