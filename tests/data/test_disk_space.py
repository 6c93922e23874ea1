"""A dataset that does not fit on the disk is refused before any download or tokenization."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from kvlab.data import list_prepared_datasets, prepare_dataset, text_formats
from kvlab.data.disk_space import check_disk_space, estimate_disk_use
from kvlab.errors import DataError
from kvlab.spec import DataConfig
from tests.support.text_files import stories, write_jsonl, write_parquet

Usage = namedtuple("Usage", "total used free")


def config(*paths, **more):
    settings = {"tokenizer": "bytes", "validation_fraction": 0.3, **more}
    return DataConfig(source="files", paths=tuple(map(str, paths)), **settings)


def set_free_bytes(monkeypatch, count):
    """Let the disk have ``count`` bytes free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**15, 10**15 - count, count))


def list_written(home):
    return [path for path in home.rglob("*") if path.suffix in (".tokens", ".npy", ".bin")]


def test_too_small_a_disk_is_refused_before_any_work(tmp_path, data_home, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", stories(300))
    monkeypatch.setattr("loky.ProcessPoolExecutor", None)  # no process can be started
    set_free_bytes(monkeypatch, 100_000)
    with pytest.raises(DataError, match=r"100 kB free.*needs about \d+ kB more") as refused:
        prepare_dataset(config(path), workers=2)
    assert "of pieces" in str(refused.value)
    assert "KVLAB_DATA" in str(refused.value)
    assert list_written(data_home) == []
    assert list_prepared_datasets() == []


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("a.jsonl", {}),
        ("a.jsonl", {"max_tokens": 30_000}),
        ("a.parquet", {"max_bytes": 30_000}),
        ("a.parquet", {"max_tokens": 10**9}),
    ],
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
    shards = 2 * (len(dataset.train) + len(dataset.validation))
    every = 2 * sum(len(text.encode()) + 1 for text in texts)
    pieces = every if "max_tokens" in more else shards
    assert estimate.download == estimate.existing == 0
    assert 0.97 * shards < estimate.shards < 1.15 * shards
    assert 0.97 * pieces < estimate.pieces < 1.15 * pieces


def test_pieces_of_an_earlier_run_are_subtracted(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", stories(300))
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    estimate = estimate_disk_use(config(path), pieces)
    set_free_bytes(monkeypatch, estimate.total - 1)
    with pytest.raises(DataError, match="free some"):
        check_disk_space(config(path), tmp_path, pieces)
    np.zeros(5000, np.uint16).tofile(pieces / "one.tokens")
    assert estimate_disk_use(config(path), pieces).total == estimate.total - 10_000
    check_disk_space(config(path), tmp_path, pieces)


@pytest.mark.parametrize(("tokens", "files"), [(None, 3), (300_000_000, 1), (1_100_000_000, 2)])
def test_only_missing_downloads_are_counted(data_home, monkeypatch, tokens, files):
    folder = data_home / "fineweb-edu" / "sample" / "10BT"
    folder.mkdir(parents=True)
    listed = [[f"{n}.parquet", 2_000_000_000] for n in range(3)]
    (folder / "listing.json").write_text(json.dumps({"revision": "r", "files": listed}))
    data = DataConfig(source="fineweb-edu-10b", max_tokens=tokens)
    assert estimate_disk_use(data, Path("none")).download == files * 2_000_000_000
    set_free_bytes(monkeypatch, 10**9)
    with pytest.raises(DataError, match=f"{files * 2} GB to download.*of pieces.*of tokens"):
        prepare_dataset(data, workers=1)
    assert [path.name for path in folder.iterdir()] == ["listing.json"]


def test_a_crawl_is_downloaded_whole_whatever_the_limit(data_home):
    folder = data_home / "fineweb-edu" / "data" / "CC-MAIN-2024-10"
    folder.mkdir(parents=True)
    listed = [[f"{n}.parquet", 10**9] for n in range(3)]
    (folder / "listing.json").write_text(json.dumps({"revision": "r", "files": listed}))
    write_parquet(folder / "1.parquet", ["here"])
    data = DataConfig(source="fineweb-edu-crawl", subset="CC-MAIN-2024-10", max_tokens=1000)
    estimate = estimate_disk_use(data, Path("none"))
    assert (estimate.download, estimate.shards) == (2 * 10**9, 2000)
    assert estimate.pieces > 2 * 10**9
    data = DataConfig(source="fineweb-edu-crawl", subset="CC-MAIN-2024-10", max_bytes=1000)
    assert estimate_disk_use(data, Path("none")).pieces < 2000


def test_a_source_of_unknown_size_is_estimated_by_its_limit():
    assert estimate_disk_use(DataConfig(), Path("none")) is None
    assert estimate_disk_use(DataConfig(max_tokens=1000), Path("none")).shards == 2000
