"""A dataset that does not fit on the disk is refused before any download or tokenization."""

import shutil
from collections import namedtuple
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvlab.data import text_formats
from kvlab.data.dataset_preparation import check_disk_space, estimate_disk_use, prepare_dataset
from kvlab.errors import DataError
from kvlab.spec import DataConfig
from tests.support.text_files import files_config, stories, write_jsonl, write_parquet

Usage = namedtuple("Usage", "total used free")


config = partial(files_config, validation_fraction=0.3)


def set_free_bytes(monkeypatch, count):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**15, 10**15 - count, count))


@pytest.mark.parametrize(
    ("name", "more"), [("a.jsonl", {"max_tokens": 30_000}), ("a.parquet", {"max_bytes": 30_000})]
)
def test_the_estimate_is_slightly_above_what_is_written(tmp_path, monkeypatch, more, name):
    texts = [text.encode("ascii", "replace").decode() for text in stories(300)]
    path = tmp_path / name
    (write_jsonl if name.endswith("l") else write_parquet)(path, texts)
    if name == "a.parquet":  # this made-up text packs better than prose
        ratio = sum(len(text.encode()) for text in texts) / path.stat().st_size
        monkeypatch.setitem(text_formats.TEXT_PER_BYTE, ".parquet", ratio)
    data = config(path, **more)
    estimate = estimate_disk_use(data, tmp_path / "none")
    dataset = prepare_dataset(data, workers=1)
    written = 2 * (len(dataset.train) + len(dataset.validation))
    every = 2 * sum(len(text.encode()) + 1 for text in texts)
    pieces = every if more else written
    assert estimate["download"] == estimate["existing"] == 0
    assert 0.97 * written < estimate["tokens"] < 1.15 * written
    assert 0.97 * pieces < estimate["pieces"] < 1.15 * pieces


def test_too_small_a_disk_is_refused_before_any_work(tmp_path, data_home, monkeypatch):
    data, pieces = config(write_jsonl(tmp_path / "a.jsonl", stories(300))), tmp_path / "pieces"
    pieces.mkdir()
    estimate = estimate_disk_use(data, pieces)
    total = estimate["pieces"] + estimate["tokens"]
    set_free_bytes(monkeypatch, total - 1)
    with monkeypatch.context() as patch:
        patch.setattr("loky.ProcessPoolExecutor", None)  # no process can be started
        with pytest.raises(DataError, match=r"KiB free.*needs about [\d.]+ KiB more.*of pieces"):
            prepare_dataset(data, workers=2)
    written = [path for path in data_home.rglob("*") if path.suffix in (".tokens", ".npy", ".bin")]
    assert written == []
    set_free_bytes(monkeypatch, total)
    check_disk_space(data, tmp_path, pieces)
    set_free_bytes(monkeypatch, total - 10_000)
    with pytest.raises(DataError):
        check_disk_space(data, tmp_path, pieces)
    np.zeros(5000, np.uint16).tofile(pieces / "one.tokens")  # of an earlier run
    check_disk_space(data, tmp_path, pieces)


def test_a_source_of_unknown_size_is_estimated_by_its_limit():
    assert estimate_disk_use(DataConfig(), Path("none")) is None
    assert estimate_disk_use(DataConfig(max_tokens=1000), Path("none"))["tokens"] == 2000
