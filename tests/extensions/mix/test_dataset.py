"""The text of a mix: every document of each source, with ids that say whose it is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvlab.data.batches import (
    divide_windows,
    find_part_ends,
    find_targets,
    get_training_batch,
    spread_windows,
)
from kvlab.data.dataset_preparation import (
    dataset_folder,
    dataset_identity,
    find_dataset,
    prepare_dataset,
)
from kvlab.data.requirements import find_shortages, scale_defaults
from kvlab.data.shards import read_manifest, verify_dataset
from kvlab.errors import DataError
from kvlab.spec import DataConfig, Experiment
from kvlab.spec.data_config import SOURCES
from kvlab.store.metrics import METRICS
from tests.data.conftest import data_home  # noqa: F401
from tests.extensions.mix import other_source
from tests.extensions.mix.mixes import (
    LENGTH,
    RECALL,
    SYMBOLS,
    encode,
    experiment,
    split_documents,
    write_texts,
)
from tests.extensions.recall.recalls import read_document
from tests.support.text_files import stories


@pytest.fixture
def paths(tmp_path):
    return write_texts(tmp_path, "one")


@pytest.mark.parametrize(("tokenizer", "ranks"), [("bytes", 256), ("gpt2:300", 300)])
def test_it_holds_the_tokens_of_each_source_alone(paths, tokenizer, ranks):
    """Held-out documents of a source are the same in every mix, and ids say whose a token is."""
    first = ranks + 1
    vocabulary = {"vocab_size": first + SYMBOLS + 1}
    of = experiment(paths, data={"tokenizer": tokenizer}, model=vocabulary)
    data = prepare_dataset(of.data, workers=1)
    assert of.data.vocab_size == first + SYMBOLS + 1
    assert verify_dataset(data.folder) == []
    alone = DataConfig(
        source="files", paths=tuple(paths), tokenizer=tokenizer, validation_fraction=0.3
    )
    symbols = DataConfig(
        source="recall", tokenizer=f"symbols:{SYMBOLS}", recall=RECALL, validation_fraction=0.3
    )
    for number, (one, shift) in enumerate([(alone, 0), (symbols, first)]):
        own = prepare_dataset(one, workers=1)
        for split, plain in ((data.train, own.train), (data.validation, own.validation)):
            begin, end = [0, *find_part_ends(split)][number : number + 2]
            assert end - begin == len(plain)
            assert (split[begin:end].astype(int) == plain[:].astype(int) + shift).all()


def test_shares_are_no_part_of_the_text_and_of_what_a_trial_computes(paths):
    few, many = experiment(paths, 0.25), experiment(paths, 0.5)
    assert dataset_identity(few.data) == dataset_identity(many.data)
    assert few.data.identity() != many.data.identity()
    other = experiment(paths, data={"recall": {**RECALL, "seed": 1}})
    assert dataset_identity(other.data) != dataset_identity(few.data)
    swapped = experiment(paths, data={"mix": {"recall": 0.25, "files": 0.75}})
    assert swapped.data == few.data
    assert hash(swapped.data) == hash(few.data)
    assert swapped.data.parts == few.data.parts
    assert Experiment.model_validate_json(few.model_dump_json()) == few


def test_two_sources_of_text_share_their_ids(tmp_path, monkeypatch):
    path, *others = write_texts(tmp_path, "one", "two")
    monkeypatch.setattr(other_source, "PATHS", others)
    monkeypatch.setitem(SOURCES, "others", other_source.ENTRY)
    of = experiment([path], data={"mix": {"files": 0.5, "others": 0.3, "recall": 0.2}})
    data = prepare_dataset(of.data, workers=1)
    assert [part.first_id for part in of.data.parts] == [0, 0, 257]
    assert of.data.target_ids == (range(257), of.data.parts[2].target_ids)
    ends = find_part_ends(data.train)
    assert len(ends) == 3
    own = set(split_documents(data.train[ends[0] : ends[1]].astype(int), [256]))
    assert own <= encode(stories(80, seed=1), "bytes")
    plain = experiment([path], data={"mix": {"files": 0.5, "others": 0.5}, "recall": None})
    assert plain.data.target_ids is None
    assert plain.data.vocab_size == 257


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=4),
    st.integers(0, 10**9),
    st.integers(1, 300),
)
def test_windows_are_divided_by_shares_wherever_one_begins(weights, first, count):
    indices = np.arange(first, first + count)
    owners, own = divide_windows(indices, weights)
    for number, weight in enumerate(weights):
        members = own[owners == number]
        assert abs(len(members) - count * weight / sum(weights)) < len(weights) + 1e-6
        assert (np.diff(members) == 1).all(), "each window of a part follows the last one"
        if len(members):
            assert abs(members[0] - first * weight / sum(weights)) < len(weights) + 1e-6
    both = divide_windows(indices[count // 2 :], weights)
    assert (both[0] == owners[count // 2 :]).all()
    assert (both[1] == own[count // 2 :]).all()


@pytest.mark.parametrize("share", [0.125, 0.3])
def test_batches_have_their_shares_and_targets(paths, share):
    of = experiment(paths, share)
    data, ranks = prepare_dataset(of.data, workers=1), of.data.vocabulary.end_of_text
    rows = {0: 0, 1: 0}
    answers = of.data.recall.target_ids
    stream = data.train[: data.train.part_tokens[0]].astype(int).tobytes()
    for step in range(12):
        batch = {"seed": 3, "step": step, "batch_size": 16, "block_size": LENGTH}
        x, y = get_training_batch(data.train, **batch, parts=of.data.parts)
        is_pairs = x[:, 0] > ranks
        for one, two, pairs in zip(x, y, is_pairs, strict=True):
            assert (one[1:] == two[:-1]).all()
            chosen = find_targets(two, of.data.target_ids)
            if pairs:
                shown, asked = read_document(of.data.recall, (one[1:] - ranks - 1).tolist())
                assert len(shown) == RECALL["pairs"], "a window begins with a document"
                assert len(asked) >= RECALL["questions"] - 1
                assert ([t - ranks - 1 in answers for t in two] == chosen).all()
                assert chosen.sum() == RECALL["questions"]
            else:
                assert chosen.all(), "every token of text is a target"
                assert max(one.max(), two.max()) <= ranks
                assert np.append(one, two[-1]).astype(int).tobytes() in stream
        counts = int(is_pairs.sum())
        assert abs(counts - 16 * share) < 1
        rows[1] += counts
        parts = [
            get_training_batch(data.train, **batch, rows=rows_of, parts=of.data.parts)[0]
            for rows_of in (slice(0, 8), slice(8, 16))
        ]
        assert (np.concatenate(parts) == x).all(), "two workers read what one reads"
    assert abs(rows[1] - 12 * 16 * share) <= 1


def test_an_answer_stands_nowhere_before_it_and_never_in_text(paths):
    of = experiment(paths)
    data = prepare_dataset(of.data, workers=1)
    text, pairs = (part.target_ids for part in of.data.parts)
    for split in (data.train, data.validation):
        end = split.part_tokens[0]
        assert not find_targets(split[:end].astype(int), [pairs]).any()
        assert not find_targets(split[end:].astype(int), [text]).any()
    batch = {"seed": 0, "step": 0, "batch_size": 64, "block_size": LENGTH}
    x, y = get_training_batch(data.train, **batch, parts=of.data.parts)
    for one, two in zip(x, y, strict=True):
        for place in np.flatnonzero(find_targets(two, [pairs])):
            assert two[place] not in one[: place + 1]


def test_scored_windows_have_their_shares(paths):
    of = experiment(paths, 0.25)
    data = prepare_dataset(of.data, workers=1)
    text = spread_windows(data.validation, 40 * LENGTH, LENGTH, of.data.parts)
    assert np.bincount(text.window_parts).tolist() == [30, 10]
    first = data.validation.part_tokens[0]
    begins = (text.starts[text.window_parts == 1] - first) % LENGTH
    assert not begins.any()
    assert len(set(text.starts.tolist())) == 40
    assert (np.diff(text.starts) >= LENGTH).all()
    with pytest.raises(DataError, match="held-out tokens, too few"):
        spread_windows(data.validation, 10**6, LENGTH, of.data.parts)


def test_a_text_that_is_too_short_for_its_share_is_refused_by_a_plan(paths):
    of = experiment(paths, 0.9, evaluation={"loss_tokens": 500 * LENGTH})
    prepare_dataset(of.data, workers=1)
    facts = find_dataset(of.data)
    assert facts.held_out_tokens > 500 * LENGTH
    (key, message), *others = find_shortages(of, facts)
    assert key == "evaluation.loss_tokens"
    assert not others
    largest = int(message.split("use ")[1].split(" or less")[0].replace(",", ""))
    data = prepare_dataset(of.data)
    fits = experiment(paths, 0.9, evaluation={"loss_tokens": largest})
    assert not list(find_shortages(fits, facts))
    spread_windows(data.validation, largest, LENGTH, of.data.parts)
    default = experiment(paths, 0.9, evaluation={})
    scaled, _ = scale_defaults(default, facts)
    assert scaled.evaluation.loss_tokens == largest


def test_a_damaged_mix_is_prepared_again(paths):
    of = experiment(paths)
    digest = prepare_dataset(of.data, workers=1).digest
    file = dataset_folder(of.data) / "validation.bin"
    file.write_bytes(file.read_bytes()[::-1])
    said = []
    assert prepare_dataset(of.data, said.append, workers=1).digest == digest
    assert any("prepared again" in line for line in said)


def test_the_licences_and_counts_are_of_all(paths):
    of = experiment(paths, data={"licence": "CC BY 4.0"})
    data = prepare_dataset(of.data, workers=1)
    assert data.licence == "files: CC BY 4.0; recall: none: drawn at random"
    splits = read_manifest(data.folder)["splits"]
    assert splits["train"]["documents"] + splits["validation"]["documents"] > 400
    assert prepare_dataset(of.data, workers=1).licence == data.licence


def test_every_source_of_a_mix_has_a_metric():
    for source, entry in SOURCES.items():
        name = f"loss_{source.replace('-', '_')}"
        assert (name in METRICS) == (entry.divide is None)
    assert METRICS["loss_recall_served"].better == "lower"
    assert METRICS["loss_recall_served_tokens"].unit == "tokens"
    assert "loss_part1" in METRICS


def test_what_only_one_source_reads_is_left_to_it(paths):
    of = experiment(paths, data={"max_tokens": 3000, "licence": "CC0"})
    text, pairs = (part.data for part in of.data.parts)
    assert (text.max_tokens, text.paths, text.licence, text.recall) == (
        3000, tuple(paths), "CC0", None,
    )  # fmt: skip
    assert (pairs.max_tokens, pairs.paths, pairs.tokenizer) == (None, (), f"symbols:{SYMBOLS}")
    with pytest.raises(ValidationError, match="keeps too few or too many ranks"):
        experiment(paths, data={"tokenizer": "gpt2:100"})
