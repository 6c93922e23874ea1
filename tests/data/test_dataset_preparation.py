"""Prepared tokens depend on text and settings alone, not on processes, kills or locations."""

import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvlab.data import dataset_preparation, text_formats
from kvlab.data.dataset_preparation import (
    ThroughputMeter,
    find_dataset,
    list_prepared_datasets,
    prepare_dataset,
)
from kvlab.data.shards import read_manifest, verify_dataset
from kvlab.data.tokenizers import load_tokenizer
from kvlab.errors import DataError
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.spec import load_experiment
from tests.support.driver_process import wait_for
from tests.support.kill_process import run_until
from tests.support.text_files import documents, files_config, stories, write_jsonl, write_parquet
from tests.support.tiny_sweep import run_kvlab

ROOT = Path(__file__).parents[2]

PREPARE = """
import json, sys
from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.spec import DataConfig
paths, workers = json.loads(sys.argv[1])
data = DataConfig(source="files", tokenizer="gpt2:2048", paths=tuple(paths),
                  validation_fraction=0.1)
dataset = prepare_dataset(data, workers=workers)
print(dataset.digest, (dataset.folder / "train.bin").stat().st_ino)
"""


config = partial(files_config, tokenizer="gpt2:2048", validation_fraction=0.1)


def read_splits(dataset):
    name = dataset.tokenizer
    return documents(dataset.validation, name), documents(dataset.train, name)


def start_script(text, *words, **options):
    command = [sys.executable, "-c", text, json.dumps(words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("name", ["gpt2:300", "bytes"])
def test_every_document_occurs_once_after_an_end_of_text(tmp_path, name):
    texts = [*stories(50), "<|endoftext|>", "  leading", "猫"]
    path = write_jsonl(tmp_path / "a.jsonl", [*texts, texts[0], "", " \n "])
    dataset = prepare_dataset(config(path, tokenizer=name))
    held_out, train = read_splits(dataset)
    assert sorted([*held_out, *train]) == sorted(texts)
    splits = read_manifest(dataset.folder)["splits"]
    assert splits["train"]["documents"] == len(train)
    assert splits["validation"]["documents"] == len(held_out)
    assert dataset.train.dtype == dataset.validation.dtype == np.uint16
    assert dataset.train.ndim == 1
    assert (dataset.train == load_tokenizer(name).end_of_text).sum() == len(train)
    text_bytes = sum(len(text.encode()) for text in held_out)
    assert splits["validation"]["text_bytes"] == text_bytes
    for texts in (held_out, train):
        hashes = [hashlib.sha256(text.encode()).digest()[8:16] for text in texts]
        assert hashes == sorted(hashes)
    lines = ""
    for split, tokens in (("train", dataset.train), ("validation", dataset.validation)):
        lines += f"{split} {hashlib.sha256(tokens.tobytes()).hexdigest()}\n"
    assert dataset.digest == hashlib.sha256(lines.encode()).hexdigest()
    stamp = (dataset.folder / "train.bin").stat()
    again = prepare_dataset(config(path, tokenizer=name))
    assert (again.folder / "train.bin").stat() == stamp, "the dataset is reused"
    assert (again.digest, list_prepared_datasets()) == (dataset.digest, [dataset.folder])


def test_the_split_has_its_share_stays_when_text_is_added_and_grows_with_its_fraction(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", stories(1000, words=3))
    second = write_parquet(tmp_path / "b.parquet", stories(300, seed=1))
    held_before, train_before = read_splits(prepare_dataset(config(first)))
    assert abs(len(held_before) / 1000 - 0.1) < 4 * (0.1 * 0.9 / 1000) ** 0.5
    held_after, train_after = read_splits(prepare_dataset(config(first, second)))
    assert set(held_before) < set(held_after)
    assert set(train_before) < set(train_after)
    large, _ = read_splits(prepare_dataset(config(first, validation_fraction=0.7)))
    assert set(held_before) < set(large)
    assert abs(len(large) / 1000 - 0.7) < 4 * (0.7 * 0.3 / 1000) ** 0.5


@pytest.mark.parametrize(("unit", "limit"), [("max_bytes", 80_000), ("max_tokens", 20_000)])
def test_a_limit_is_a_fair_mixture_of_whole_documents(tmp_path, unit, limit):
    everything = [*stories(300), *stories(300, seed=1)]
    write_jsonl(tmp_path / "in" / "a.jsonl", everything[:300])
    write_jsonl(tmp_path / "in" / "b.jsonl", everything[300:])
    dataset = prepare_dataset(config(tmp_path / "in", validation_fraction=0.5, **{unit: limit}))
    texts = [*chain(*read_splits(dataset))]
    sizes = {
        "max_bytes": sum(len(text.encode()) for text in texts),
        "max_tokens": len(dataset.train) + len(dataset.validation),
    }
    assert limit <= sizes[unit] < limit + 1 + max(len(text.encode()) for text in texts)
    from_first = sum(text.startswith("Story 0-") for text in texts)
    assert 0.3 < from_first / len(texts) < 0.7
    assert set(texts) < set(everything)


def test_tokens_do_not_depend_on_files_or_processes(tmp_path, monkeypatch):
    texts = stories(120)
    write_jsonl(tmp_path / "one" / "all.jsonl", texts)
    write_parquet(tmp_path / "two" / "z.parquet", texts[:50], row_group_size=7)
    write_jsonl(tmp_path / "two" / "a.jsonl.xz", texts[50:], ".xz")
    digests = set()
    limits = ({}, {"max_bytes": 20_000}, {"max_tokens": 20_000})
    ways = [("one", 1, limits), ("two", 1, limits), ("two", 2, limits[1:2])]
    for number, (folder, workers, tried) in enumerate(ways):
        monkeypatch.setenv("KVLAB_DATA", str(tmp_path / f"home-{number}"))
        for more in tried:
            digests.add((prepare_dataset(config(tmp_path / folder, **more), workers=workers).digest,
                         *more))  # fmt: skip
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("write", "suffix", "workers", "stride"),
    [
        (write_jsonl, ".jsonl", 1, 3),
        pytest.param(write_parquet, ".parquet", 1, 1, marks=pytest.mark.faults),
        # two processes write the pieces, and live on for a moment when their parent is killed
        pytest.param(write_parquet, ".parquet", 2, 3, marks=pytest.mark.faults),
    ],
)
def test_a_kill_at_any_durable_step_leaves_no_incomplete_dataset(
    tmp_path, monkeypatch, write, suffix, workers, stride
):
    data = config(
        *(write(tmp_path / f"{n}{suffix}", stories(10, seed=n)) for n in range(3)),
        tokenizer="bytes",
        validation_fraction=0.3,
    )
    digests, moment, code = set(), 1 - stride, None
    while code != 0:
        moment += stride
        home = tmp_path / "homes" / str(moment)
        monkeypatch.setenv("KVLAB_DATA", str(home))
        code = run_until(
            lambda: prepare_dataset(data, workers=workers), moment, ("fsync", "replace")
        )
        assert code in (0, -signal.SIGKILL)
        assert [
            problem for path in list_prepared_datasets() for problem in verify_dataset(path)
        ] == []
        digests.add(prepare_dataset(data).digest)
        assert code == 0 or len([*home.glob("datasets/.*.work")]) <= 1
        shutil.rmtree(home)
    assert moment > (30 if workers == 1 else 10)
    assert len(digests) == 1


def list_pieces(home):
    return sorted(home.glob("datasets/.*.work/pieces/*.npy"))


def test_pieces_made_before_a_kill_are_reused(tmp_path, data_home):
    paths = [str(write_jsonl(tmp_path / f"{n}.jsonl", stories(200, seed=n))) for n in range(6)]
    child = start_script(PREPARE, paths, 1)
    wait_for(lambda: len(list_pieces(data_home)) >= 2)
    child.kill()
    assert child.wait() == -signal.SIGKILL, "it was not over"
    # Marked, to recognize them in the dataset.
    made = list_pieces(data_home)[0].with_suffix(".tokens")
    marks = np.full(made.stat().st_size // 2, 1234, np.uint16)
    made.write_bytes(marks.tobytes())
    dataset = prepare_dataset(config(*paths))
    there = np.concatenate([dataset.train, dataset.validation])
    # all but the ends of text, and held-out documents: the marks of all are alike
    assert 0.8 * len(marks) < (there == 1234).sum() <= len(marks)
    assert not list(data_home.glob("datasets/.*.work"))


def test_pieces_that_a_kill_has_left_in_part_are_written_again(tmp_path, data_home, monkeypatch):
    """The kill came while they were removed, and the dataset was damaged later."""
    data = config(write_jsonl(tmp_path / "a.jsonl", stories(40)))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        whole = prepare_dataset(data)
    assert list_pieces(data_home)
    for path in data_home.glob("datasets/.*.work/pieces/*.tokens"):
        path.unlink()
    (whole.folder / "train.bin").write_bytes(b"damaged")
    assert prepare_dataset(data).digest == whole.digest


def test_processes_that_prepare_concurrently_get_one_dataset(tmp_path, data_home):
    paths = [str(write_jsonl(tmp_path / f"{n}.jsonl", stories(300, seed=n))) for n in range(3)]
    children = [start_script(PREPARE, paths, 1) for _ in range(2)]
    answers = {child.communicate(timeout=60)[0] for child in children}
    assert [child.returncode for child in children] == [0, 0]
    assert len(answers) == 1
    assert len(list(data_home.glob("datasets/*/manifest.json"))) == 1


def test_a_tokenizing_process_that_dies_is_a_data_error(tmp_path):
    for number in range(8):
        write_jsonl(tmp_path / "text" / f"{number}.jsonl", stories(1000, seed=number))
    with ThreadPoolExecutor(1) as thread:
        preparing = thread.submit(prepare_dataset, config(tmp_path / "text"), workers=2)
        wait_for(lambda: preparing.done() or find_tokenizing_processes())
        find_tokenizing_processes()[0].kill()
        with pytest.raises(DataError, match="ended early"):
            preparing.result(timeout=60)
    assert find_tokenizing_processes() == []
    assert list_prepared_datasets() == []


def test_tokenizing_processes_end_when_their_parent_is_killed(tmp_path, data_home):
    paths = [str(write_jsonl(tmp_path / f"{n}.jsonl", stories(1000, seed=n))) for n in range(12)]
    child = start_script(PREPARE, paths, 2)
    wait_for(lambda: len(find_tokenizing_processes(child.pid)) > 1 and list_pieces(data_home))
    workers = find_tokenizing_processes(child.pid)
    child.kill()
    child.communicate()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []


def find_tokenizing_processes(parent=None):
    found = []
    for child in psutil.Process(parent).children():
        with suppress(psutil.NoSuchProcess):
            if "popen_loky" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.mark.parametrize(
    ("name", "between"),
    [("bytes", "\n \n"), ("bytes", "\n"), ("bytes", ""), ("gpt2:2048", "\n"), ("gpt2:2048", " ")],
)
def test_one_document_is_split_at_the_coarsest_boundary_near_the_cut(tmp_path, name, between):
    text = between.join(stories(100))
    if not between:
        text = text.replace(" ", "")
    (tmp_path / "mine.txt").write_text(text)
    data = config(tmp_path / "mine.txt", tokenizer=name)
    dataset = prepare_dataset(data)
    (held_out,), (train,) = read_splits(dataset)
    assert text.startswith(train)
    assert text.endswith(held_out)
    gap = text[len(train) : len(text) - len(held_out)]
    if name == "bytes" and "\n" in between:  # other tokens reach across a boundary
        assert train.endswith(between)
        assert gap.count(between) == 1
        assert gap.endswith(between)
    raw = [len(part.encode()) for part in (train, gap, held_out)]
    assert sum(raw) == len(text.encode())
    assert 0.05 < raw[2] / sum(raw) <= 0.1
    assert 0 < raw[1] < raw[2]
    facts = find_dataset(data)
    assert facts.held_out_bytes == raw[2]
    (warning,) = (line for line in facts.warnings if "is one document" in line)
    assert f"a gap of {raw[1]:,} bytes" in warning


def test_a_document_of_a_few_words_is_split_into_two_with_text_or_refused(tmp_path):
    """Also where a token reaches across every boundary near the cut."""
    rng, path, outcomes = random.Random(0), tmp_path / "mine.txt", Counter()
    for _ in range(60):
        text = "".join(rng.choices(["a", " ", "\n", "the ", "é", "   ", "story "], k=8))
        path.write_text(f"{text}.")
        data = config(path, validation_fraction=rng.choice([0.1, 0.5, 0.9, 0.99]))
        try:
            dataset = prepare_dataset(data)
        except DataError as error:
            outcomes[error.field] += 1
            continue
        (held_out,), (train,) = read_splits(dataset)
        assert held_out
        assert train
        assert text.startswith(train)
        assert f"{text}.".endswith(held_out)
        outcomes["split"] += 1
    assert outcomes.keys() == {"split", "data.validation_fraction"}
    assert min(outcomes.values()) > 10


def test_one_file_in_parts_is_split_at_its_end_and_its_example_plans(tmp_path, monkeypatch):
    """nanoGPT's input.txt is this case: over a million characters, so it is cut into parts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text_formats, "PART_CHARACTERS", (4_000, 5_000))
    paragraphs = stories(3500)
    text = "\n\n".join(paragraphs)
    assert len(text) > text_formats.MAX_DOCUMENT_CHARACTERS
    (tmp_path / "mine.txt").write_text(text)
    shutil.copy(ROOT / "experiments" / "own-text.yaml", tmp_path)
    sweep = "experiment: own-text.yaml\nquestion: Which?\n"
    sweep += "factors: {heads: {mha: {}, mqa: {model.n_kv_head: 1}}}\n"
    (tmp_path / "s.yaml").write_text(sweep)
    code, out, error = run_kvlab("plan", tmp_path / "s.yaml", "--rate", "1e12")
    assert (code, error) == (0, "")
    assert "the text is one document, so its last 5." in out
    assert "not other text of its kind" in out
    dataset = prepare_dataset(load_experiment(tmp_path / "own-text.yaml").data)
    held_out, train = read_splits(dataset)
    parts = [*text_formats.split_text(text)]
    assert [*train, *held_out] == parts[: len(train)] + parts[len(train) + 1 :], "but the gap"
    assert 0 <= sum(map(len, held_out)) / len(text) - 0.05 < 5_000 / len(text)


@pytest.mark.parametrize("texts", [[], ["", "  "], ["one"], ["one", "two"]])
def test_too_little_text_is_refused(tmp_path, texts):
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    with pytest.raises(
        DataError, match=r"no text|empty files|one short document|holds out (none|all)"
    ):
        prepare_dataset(config(path, validation_fraction=0.001))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train.bin", "cut"), ("train.bin", "flip"), ("validation.bin", "flip"),
        ("manifest.json", "empty"), ("manifest.json", "without a split"),
        ("manifest.json", "of an older version"),
    ],
)  # fmt: skip
def test_a_damaged_dataset_is_found_moved_aside_and_prepared_again(tmp_path, name, damage):
    data, lines = config(write_jsonl(tmp_path / "a.jsonl", stories(100))), []
    folder = prepare_dataset(data).folder
    assert verify_dataset(folder) == []
    path = folder / name
    whole = path.read_bytes()
    if damage == "without a split":
        manifest = read_sealed_json(path)
        del manifest["splits"]["validation"]
        write_sealed_json(path, manifest)
    elif damage == "of an older version":
        path.write_text('{"schema": 0}')
    else:
        flipped = bytes([whole[0] ^ 1]) + whole[1:]
        path.write_bytes({"cut": whole[:-2], "empty": b"", "flip": flipped}[damage])
    assert len(verify_dataset(folder)) == 1
    prepare_dataset(data, lines.append)
    assert path.read_bytes() == whole
    assert "moved to" in lines[0]
    assert (folder.parent / "damaged" / "1" / folder.name).exists()


def test_rate_and_time_left_without_the_units_of_an_earlier_run(monkeypatch):
    moment, lines = [50.0], []
    monkeypatch.setattr(dataset_preparation.time, "monotonic", lambda: moment[0])
    meter = ThroughputMeter("tokens", 2_000_000, lines.append)
    for seconds, size, tokens, is_new in (
        (0.5, 1_000_000, 200_000, True),  # not more than one line a second
        (0.5, 8_000_000, 400_000, False),
        (1.0, 3_000_000, 700_000, True),
        (2.0, 0, 700_000, True),
    ):
        moment[0] += seconds
        meter.add({"bytes": size, "tokens": tokens}, is_new=is_new)
    unknown = ThroughputMeter("bytes", None, lines.append)
    moment[0] += 2
    unknown.add({"bytes": 2_000_000, "tokens": 0}, is_new=False)
    assert lines == [
        "tokenizing: 8.583 MiB of text, 976.6 KiB/s, 0.6 million tokens, about 7s left",
        "tokenizing: 11.44 MiB of text, 1.907 MiB/s, 1.3 million tokens, about 2s left",
        "tokenizing: 11.44 MiB of text, 976.6 KiB/s, 2.0 million tokens",
        "tokenizing: 1.907 MiB of text, 0.0 million tokens",
    ]
