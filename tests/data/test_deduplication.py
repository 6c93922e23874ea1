"""Near-duplicates and shared passages, against sets of shingles and of n-grams."""

import hashlib
import random

import numpy as np
import pytest

from kvlab.data import deduplication
from kvlab.data.dataset_builder import validation_mask
from kvlab.data.dataset_preparation import find_dataset, prepare_dataset
from kvlab.data.deduplication import (
    BANDS,
    band_hashes,
    find_first_of_kind,
    measure_overlap,
    shared_passage_shares,
)
from kvlab.data.sources import TextSource
from kvlab.data.token_pieces import DOCUMENT_DTYPE
from kvlab.spec import DataConfig
from kvlab.spec.data_config import SOURCES, SourceEntry
from tests.support.text_files import documents, stories, write_jsonl


def words(count, seed):
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(count)]


def shingles(text):
    raw = b" ".join(text.encode().split()).lower()
    return {raw[i : i + 32] for i in range(len(raw) - 31)}


def with_similarity(text, share, seed):
    """Return ``text`` with its last words replaced, and the Jaccard similarity to it."""
    parts = text.split()
    kept = int(len(parts) * share)
    other = " ".join([*parts[:kept], *words(len(parts) - kept, seed)])
    a, b = shingles(text), shingles(other)
    return other, len(a & b) / len(a | b)


@pytest.mark.parametrize(("share", "least", "most"), [(0.95, 0.95, 1), (0.2, 0, 0.12)])
def test_near_duplicates_are_found_as_often_as_bands_agree(share, least, most):
    found, expected = [], []
    for seed in range(100):
        text = " ".join(words(150, seed))
        other, similarity = with_similarity(text, share, 1000 + seed)
        found.append((band_hashes(text.encode()) == band_hashes(other.encode())).any())
        expected.append(1 - (1 - similarity**4) ** BANDS)
    assert least <= np.mean(found) <= most
    assert np.mean(found) == pytest.approx(np.mean(expected), abs=0.06)


def test_case_and_white_space_do_not_count():
    assert (band_hashes(b"One  Two\n\n three") == band_hashes(b"one two Three ")).all()
    assert not (band_hashes(b"one two three") == band_hashes(b"one two four")).any()


def test_the_first_of_each_kind_remains():
    text = " ".join(words(200, 1))
    near, nearer = with_similarity(text, 0.97, 2)[0], with_similarity(text, 0.98, 3)[0]
    texts = ["other " * 40, text, near, " ".join(words(200, 4)), nearer, "other " * 40]
    hashes = np.array([hash(text) & (2**63 - 1) for text in texts], np.uint64)
    bands = np.stack([band_hashes(text.encode()) for text in texts])
    expected = [True, True, False, True, False, False]
    assert find_first_of_kind(hashes, bands).tolist() == expected


@pytest.mark.parametrize("length", [1, 13, 64])
def test_overlap_is_that_of_sets_of_ngrams(monkeypatch, length):
    monkeypatch.setattr(deduplication, "_NGRAM_CHUNK", 1000)
    draw = np.random.default_rng(length)
    train = draw.integers(0, 50, 4000).astype(np.uint16)
    held_out = draw.integers(0, 60, 600).astype(np.uint16)
    held_out[100:180] = train[990:1070]  # across the end of a chunk
    held_out[560:600] = train[:40]
    seen = {tuple(train[i : i + length]) for i in range(len(train) - length + 1)}
    covered = set()
    for i in range(len(held_out) - length + 1):
        if tuple(held_out[i : i + length]) in seen:
            covered.update(range(i, i + length))
    share = measure_overlap(held_out, train, length, threads=2)
    assert share == len(covered) / 600
    assert measure_overlap(held_out[: length - 1], train, length, threads=1) == 0
    for extra in range(2 * length):  # texts that are hardly longer than an n-gram
        longer = np.arange(length + extra, dtype=np.uint16)
        shorter = np.append(longer[-length:], 999).astype(np.uint16)
        assert measure_overlap(shorter, longer, length, 1) == length / (length + 1)
        assert measure_overlap(longer, shorter, length, 1) == length / (length + extra)


def test_shares_of_shared_passages():
    train = [" ".join(words(3000, seed)).encode() for seed in range(3)]
    new = " ".join(words(1000, 9)).encode()
    half = new[:2000] + train[1][500:2500]
    shares = shared_passage_shares([new, half, train[2][1000:5000], b"short"], iter(train), 2)
    assert shares == pytest.approx([0, 0.5, 1, 0], abs=0.1)
    assert shares[0] == shares[3] == 0


def prepare(folder, texts, tokenizer="bytes"):
    path = write_jsonl(folder / "a.jsonl", texts)
    data = DataConfig(source="files", paths=(str(path),), tokenizer=tokenizer,
                      validation_fraction=0.3)  # fmt: skip
    return data, prepare_dataset(data, workers=1)


def test_documents_that_repeat_others_are_left_out(tmp_path):
    texts = stories(150, words=120)
    near = [text.replace(text.split()[40], "changed") for text in texts[:40]]
    _, dataset = prepare(tmp_path, texts + near, "gpt2:2048")
    kept = {*documents(dataset.train, "gpt2:2048"), *documents(dataset.validation, "gpt2:2048")}
    missing = [index for index in range(40) if not {texts[index], near[index]} <= kept]
    assert len(missing) == 40
    assert set(texts[40:]) <= kept
    assert dataset.overlap[50] == 0


def test_held_out_documents_with_training_passages_are_left_out(tmp_path):
    quote = " ".join(words(30, 77))
    texts = stories(200, words=120)
    quoting = [f"{text} {quote}" for text in stories(60, seed=1, words=120)]
    chosen = {}
    for tokenizer in ("bytes", "gpt2:2048"):
        _, dataset = prepare(tmp_path, [*texts, *quoting], tokenizer)
        held_out = documents(dataset.validation, tokenizer)
        assert not any(quote in text for text in held_out)
        assert sum(quote in text for text in documents(dataset.train, tokenizer)) > 20
        chosen[tokenizer] = held_out
    assert chosen["bytes"] == chosen["gpt2:2048"]


def test_an_overlap_that_remains_is_warned_of(tmp_path, monkeypatch):
    quote = " ".join(words(40, 77))
    texts = [f"{text} {quote}" for text in stories(100, words=120)]
    monkeypatch.setattr("kvlab.data.deduplication.MAX_SHARED", 1.0)
    data, dataset = prepare(tmp_path, texts)
    assert dataset.overlap[200] > 0.2
    (warning,) = find_dataset(data).warnings
    assert warning.startswith(f"{dataset.overlap[200]:.1%} of the held-out tokens are inside")


class Modules(TextSource):
    """60 groups of up to 20 documents each."""

    licence = "none needed"
    is_shuffled = True
    is_grouped = True

    def identity(self, data):  # noqa: ARG002
        return "modules"

    def units(self, data, progress):  # noqa: ARG002
        yield {"key": "modules"}

    def read(self, unit):  # noqa: ARG002
        for group in range(60):
            for text in stories(1 + group % 20, seed=group, words=20):
                yield text, f"module {group}"


def test_groups_are_held_out_as_a_whole(monkeypatch):
    monkeypatch.setitem(SOURCES, "modules", SourceEntry(f"{__name__}:Modules"))
    data = DataConfig(source="modules", tokenizer="bytes", validation_fraction=0.2)
    dataset = prepare_dataset(data, workers=1)
    held_out, train = (
        {text.split("-")[0] for text in documents(split, "bytes")}
        for split in (dataset.validation, dataset.train)
    )
    assert not held_out & train
    assert len(held_out | train) == 60
    total = len(dataset.validation) + len(dataset.train)
    assert 0.2 <= len(dataset.validation) / total < 0.25


def test_a_group_of_most_of_the_text_is_training_text():
    table = np.zeros(60, DOCUMENT_DTYPE)
    table["bytes"] = 10
    table["split"] = [int(hashlib.sha256(bytes([i // 3])).hexdigest()[:8], 16) for i in range(60)]
    table["split"][:30] = 0  # the first by hash
    mask = validation_mask(table, 0.2, is_grouped=True)
    assert not mask[:30].any()
    assert mask.sum() == 12
