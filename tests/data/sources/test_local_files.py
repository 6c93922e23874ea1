"""`files`: found in folders, identified by contents."""

import os
import shutil

import pytest

from kvlab.data.data_dir import ignore_progress
from kvlab.data.dataset_preparation import dataset_identity
from kvlab.data.sources.local_files import LocalFiles
from kvlab.errors import DataError
from tests.contracts.source_contract import SourceContract
from tests.support.text_files import files_config as config
from tests.support.text_files import stories, write_jsonl, write_parquet


def texts(data):
    source = LocalFiles()
    return [text for unit in source.units(data, ignore_progress) for text, _ in source.read(unit)]


class TestLocalFilesContract(SourceContract):
    @pytest.fixture
    def data(self, tmp_path):
        write_jsonl(tmp_path / "text" / "b.jsonl.zst", stories(5), ".zst")
        write_parquet(tmp_path / "text" / "a.parquet", stories(5, seed=1))
        return config(tmp_path / "text")


def test_folders_are_walked_and_ignored_files_are_reported(tmp_path):
    write_jsonl(tmp_path / "in" / "b" / "x.jsonl", ["two"])
    write_jsonl(tmp_path / "in" / "a" / "x.jsonl.gz", ["one"], ".gz")
    write_jsonl(tmp_path / "in" / ".hidden" / "x.jsonl", ["never"])
    (tmp_path / "in" / "notes.md").write_text("never")
    (tmp_path / "in" / "z.txt").write_text("three")
    assert texts(config(tmp_path / "in")) == ["one", "two", "three"]
    messages = []
    list(LocalFiles().units(config(tmp_path / "in"), messages.append))
    assert ".md" in messages[0]


def test_a_link_has_the_format_of_its_own_name(tmp_path):
    """As in a cache whose files are named by their hash."""
    blob = write_jsonl(tmp_path / "blobs" / "0f3a", ["one", "two"])
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.jsonl").symlink_to(blob)
    assert texts(config(tmp_path / "in")) == ["one", "two"]
    assert dataset_identity(config(tmp_path / "in")) == dataset_identity(
        config(write_jsonl(tmp_path / "plain.jsonl", ["one", "two"]))
    )
    blob.write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"x\.jsonl is not UTF-8 at byte 0") as refused:
        dataset_identity(config(tmp_path / "in"))
    assert refused.value.field == "data.paths.0"


def test_identity_depends_on_contents_not_on_names_locations_or_order(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", stories(3))
    two = write_jsonl(tmp_path / "two.jsonl", stories(3, seed=1))
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("kvlab-data"))
    os.rename(tmp_path / "copy" / "one.jsonl", tmp_path / "copy" / "zzz.jsonl")
    base = config(one, two)
    for same in (config(two, one), config(one, two, one), config(tmp_path / "copy")):
        assert dataset_identity(same) == dataset_identity(base)
        assert len(texts(same)) == 6, "a second copy adds nothing"
    others = [{"tokenizer": "gpt2"}, {"max_bytes": 1000}, {"validation_fraction": 0.5},
              {"max_tokens": 1000}, {"paths": (str(one),)}]  # fmt: skip
    changed = [base.model_copy(update=other) for other in others]
    assert len({dataset_identity(data) for data in [base, *changed]}) == 6


def test_hashes_of_files_that_are_not_recent_are_cached(tmp_path, data_home):
    path = tmp_path / "a.txt"
    path.write_text("hello")
    dataset_identity(config(path))
    assert not (data_home / "digests.json").exists(), "it may change within its time stamp"
    os.utime(path, (1e9, 1e9))
    before = dataset_identity(config(path))
    assert (data_home / "digests.json").is_file()
    stat = path.stat()
    with open(path, "r+") as file:  # same inode, size and time: only reading would tell
        file.write("hellO")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert dataset_identity(config(path)) == before
    os.utime(path, (1e9 + 1, 1e9 + 1))
    changed = dataset_identity(config(path))
    assert changed != before
    (data_home / "digests.json").write_text("{ cut")
    assert dataset_identity(config(path)) == changed


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", stories(3))
    source = LocalFiles()
    unit = next(source.units(config(path), ignore_progress))
    reading = source.read(unit)
    next(reading)
    with open(path, "a") as file:
        file.write('{"text": "late"}\n')
    with pytest.raises(DataError, match="changed while it was read"):
        list(reading)
