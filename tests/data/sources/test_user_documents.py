"""Text sources of users' files: what they yield, what is in their identity, what is refused."""

import json
from pathlib import Path

import pytest

from kvlab.data.data_dir import ignore_progress
from kvlab.data.dataset_preparation import dataset_identity, prepare_dataset
from kvlab.data.shards import read_manifest
from kvlab.data.sources import get_source, user_documents
from kvlab.errors import DataError, SpecError
from kvlab.spec import Experiment, load_experiment
from kvlab.trial import Trial
from tests.contracts.source_contract import SourceContract
from tests.support.text_files import documents
from tests.support.tiny_sweep import run_kvlab

EXAMPLE = Path(__file__).parents[3] / "docs" / "extend" / "sums.py"
YAML = """\
name: own
extensions: [mine.py]
model: {vocab_size: 257, block_size: 16, n_layer: 2, n_head: 2, n_embd: 16}
data: {source: sums, tokenizer: bytes, validation_fraction: 0.2}
evaluation: {loss_tokens: 64}
benchmark: {prompt_tokens: 8, new_tokens: 8}
"""
BODY = (
    '            yield "\\n".join(f"{first} + {second} = {first + second}" for second in numbers)'
)
assert BODY in EXAMPLE.read_text()


def write(folder, body=BODY, text=None, yaml=YAML):
    (folder / "mine.py").write_text((text or EXAMPLE.read_text()).replace(BODY, body))
    (folder / "e.yaml").write_text(yaml)
    return folder / "e.yaml"


def load(folder, body=BODY, text=None, **data):
    overrides = {f"data.{key}": value for key, value in data.items()}
    return load_experiment(write(folder, body, text), overrides).data


class TestSums(SourceContract):
    reads_files = False

    @pytest.fixture
    def data(self, tmp_path):
        return load(tmp_path, options={"largest": 40})


def test_parts_of_any_size_are_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(user_documents, "UNIT_CHARACTERS", 1000)
    data = load(tmp_path, options={"largest": 30})
    assert len(list(get_source(data.source).units(data, ignore_progress))) == 11
    parts = prepare_dataset(data, workers=1)
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "other"))
    monkeypatch.setattr(user_documents, "UNIT_CHARACTERS", 10**6)
    whole = prepare_dataset(data, workers=2)
    assert whole.digest == parts.digest
    texts = {*documents(whole.train, "bytes"), *documents(whole.validation, "bytes")}
    sums = ("\n".join(f"{a} + {b} = {a + b}" for b in range(31)) for a in range(31))
    assert texts == {*sums}
    assert read_manifest(whole.folder)["source"] == "sums"


def test_an_endless_source_is_read_to_its_limit(tmp_path):
    text = EXAMPLE.read_text().replace("numbers =", "first, numbers = 0,")
    endless = text.replace("for first in numbers:", "while first := first + 1:")
    data = load(tmp_path, text=endless.replace('"sums"', '"sums"\n    is_shuffled = True'),
                max_tokens=40_000, options={"largest": 20})  # fmt: skip
    dataset = prepare_dataset(data, workers=1)
    assert 40_000 <= len(dataset.train) + len(dataset.validation) < 41_000


def test_the_text_of_the_file_and_what_it_reads_are_in_the_identities(tmp_path, monkeypatch):
    read = EXAMPLE.read_text().replace('"sums"', '"sums"\n    reads_paths = True')
    (tmp_path / "a.csv").write_text("1\n")
    first = load(tmp_path, text=read, paths=[str(tmp_path / "a.csv")])
    plain, commented = load(tmp_path), load(tmp_path, text=f"# new\n{EXAMPLE.read_text()}")
    edited, fewer = (
        load(tmp_path, BODY.replace("+ {s", "plus {s")),
        load(tmp_path, options={"largest": 9}),
    )
    found = [dataset_identity(one) for one in (plain, edited, fewer, first)]
    (tmp_path / "a.csv").write_text("2\n")
    assert len({*found, dataset_identity(first)}) == 5
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.csv").write_text("2\n")
    folder = load(tmp_path, text=read, paths=[str(tmp_path / "texts")])
    before = dataset_identity(folder)
    (tmp_path / "texts" / ".DS_Store").write_bytes(b"\0Bud1")  # of macOS, for a folder looked at
    (tmp_path / "texts" / ".git").mkdir()
    (tmp_path / "texts" / ".git" / "index").write_bytes(b"DIRC")
    assert dataset_identity(folder) == before
    assert dataset_identity(commented) == found[0]
    own = "    def fingerprint(self, data):\n        return open('version').read()\n\n    def documents"
    marked = load(tmp_path, text=EXAMPLE.read_text().replace("    def documents", own))
    monkeypatch.chdir(tmp_path)
    for version in ("1", "2"):
        (tmp_path / "version").write_text(version)
        found.append(dataset_identity(marked))
    assert len({*found}) == len(found)

    def identify(data):
        experiment = load_experiment(tmp_path / "e.yaml")
        return Trial.of(experiment.model_copy(update={"data": data}), "text", 0).training_id

    assert identify(plain) == identify(commented)
    assert len({*map(identify, (plain, edited, fewer))}) == 3


def test_a_trial_carries_the_source_into_the_record(tmp_path):
    experiment = load_experiment(write(tmp_path), {"data.options": {"largest": 7}})
    kept = json.loads(json.dumps(experiment.model_dump(mode="json")))
    assert (kept["data"]["source"], kept["data"]["options"]) == ("sums", {"largest": 7})
    assert Experiment.model_validate(kept) == experiment


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("            yield first", "mine.py:18: documents: yields 0, which is no str"),
        ("            pass\n        return 7", "mine.py:15: documents: returns 7"),
        ("            pass\n        return 'text'", "mine.py:15: documents: returns text"),
        ("            yield str(1 / (first - 3))", "mine.py:18: documents: ZeroDivisionError"),
        ("            yield ' '", "mine.py:15: documents: yields no text"),
        ("            pass\n        return []", "mine.py:15: documents: yields no text"),
    ],
)
def test_what_is_no_text_is_refused_with_its_line(tmp_path, body, message):
    data = load(tmp_path, body)
    with pytest.raises(DataError) as error:
        prepare_dataset(data, workers=1)
    assert str(error.value).startswith(f"data.source = sums fails at {message}")
    assert error.value.field == "data.source"


def test_a_fingerprint_that_is_no_plain_data_is_refused_by_a_plan(tmp_path, monkeypatch):
    own = "    def fingerprint(self, data):\n        return object()\n\n    def documents"
    write(tmp_path, text=EXAMPLE.read_text().replace("    def documents", own))
    (tmp_path / "s.yaml").write_text("question: q\nexperiment: e.yaml\nfactors: {a: {b: {}}}\n")
    monkeypatch.chdir(tmp_path)
    code, _, err = run_kvlab("plan", "s.yaml")
    assert (
        code,
        err.count("e.yaml:4:16: data.source = sums fails at mine.py:15: fingerprint: "),
    ) == (2, 1)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("1\n")
    read = EXAMPLE.read_text().replace('"sums"', '"sums"\n    reads_paths = True')
    body = "            open(data.paths[0], 'a').write('2')\n            yield str(first)"
    with pytest.raises(DataError, match="changed while it was read"):
        prepare_dataset(load(tmp_path, body, read, paths=[str(tmp_path / "a.csv")]), workers=1)
    with pytest.raises(DataError, match=r"data.paths.0 = .*b.csv is no file"):
        dataset_identity(load(tmp_path, body, read, paths=[str(tmp_path / "b.csv")]))


@pytest.mark.parametrize(
    ("change", "data", "message"),
    [
        (('"sums"', '"files"'), {}, "mine.py:10:1: Sums has name = 'files'"),
        (("int = 99", "int"), {}, "mine.py:10:1: Sums has options ="),
        (("int = 99", "list[int] = [1]"), {}, "mine.py:10:1: Sums has options ="),
        (("= SumsOptions", "= 7"), {}, "mine.py:10:1: Sums has options = 7"),
        (("", ""), {"options": {"smallest": 1}}, "data.options.smallest = 1 is no option of source: sums; use largest"),
        (("", ""), {"options": {"largest": "x"}}, "data.options.largest = x is not a whole number"),
        (("", ""), {"paths": ["x"]}, "data.paths = ['x'] is read only by"),
        (("", ""), {"source": "docstrings", "options": {"largest": 1}}, "data.options = {...} is not read by source: docstrings"),
        (("options = ", "other = "), {"options": {"largest": 1}}, "data.options = {...} is not read by source: sums"),
        (("", ""), {"source": "sum"}, "data.source = sum is not one of"),
    ],
)  # fmt: skip
def test_mistakes_of_files_and_of_settings(tmp_path, change, data, message):
    text = EXAMPLE.read_text().replace(*change, 1)
    with pytest.raises(SpecError) as error:
        load(tmp_path, text=text, **data)
    assert message in str(error.value)


SYMBOLS = "            yield ''.join(chr(0x4E00 + (first + n * n) % 12) for n in range(3))"


def write_symbol_source(**changes):
    facts = {"symbols": 12, "target_ids": range(9, 12), "document_tokens": 4} | changes
    own = "".join(
        f"\n    @property\n    def {name}(self):\n        return {fact}\n"
        for name, fact in facts.items()
        if fact is not None
    )
    text = EXAMPLE.read_text().replace("SpecModel", "SourceOptions")
    return text.replace("largest: int = 99\n", f"largest: int = 99\n{own}")


def test_documents_of_symbols_say_which_tokens_are_targets(tmp_path):
    symbols, text = SYMBOLS, write_symbol_source()
    data = load(tmp_path, symbols, text, tokenizer="symbols:12")
    assert (data.target_ids, data.parts[0].document_tokens) == ((range(9, 12),), 4)
    dataset = prepare_dataset(data, workers=1)
    assert not len(dataset.train) % 4
    with pytest.raises(SpecError, match="does not hold the 12 symbols of source: sums"):
        load(tmp_path, symbols, text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"symbols": "self.largest.bit_count"}, "symbols = <built-in method bit_count"),
        ({"symbols": 0}, "symbols = 0; define a property that is a whole number above 0"),
        ({"target_ids": [9, 10]}, "target_ids = [9, 10]; define a property that is a range of ids"),
        ({"target_ids": "range(9, 13)"}, "target_ids = range(9, 13); define"),
        ({"target_ids": "range(6, 12, 2)"}, "target_ids = range(6, 12, 2); define"),
        ({"document_tokens": 1}, "document_tokens = 1; define"),
        ({"document_tokens": None}, "options without document_tokens; define it as a property"),
    ],
)
def test_options_that_do_not_describe_symbols_are_refused(tmp_path, changes, message):
    with pytest.raises(SpecError, match=r"mine.py:\d+:1: Sums has options with") as error:
        load(tmp_path, SYMBOLS, write_symbol_source(**changes), tokenizer="symbols:12")
    assert message in str(error.value)


def test_options_of_yaml_that_do_not_describe_symbols_are_refused_at_their_key(tmp_path):
    text = write_symbol_source(symbols="self.largest")
    options = {"largest": 7}
    with pytest.raises(
        SpecError, match=r"data.options = {...} has target_ids = range\(9, 12\); de"
    ):
        load(tmp_path, SYMBOLS, text, tokenizer="symbols:12", options=options)


def test_documents_of_another_length_than_their_options_say_are_refused(tmp_path):
    text = write_symbol_source(document_tokens=8)
    data = load(tmp_path, SYMBOLS, text, tokenizer="symbols:12")
    with pytest.raises(
        DataError, match=r"mine.py:\d+: documents: yields 3 symbols, 4 tokens .*, and .* is 8;"
    ):
        prepare_dataset(data, workers=1)
