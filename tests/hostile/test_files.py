"""Copies, garbage, texts, specs and pages that mean harm stay where they belong, and end."""

import gzip
import io
import lzma
import os
import tarfile
import time
import tracemalloc

import pyarrow as pa
import pytest
from pyarrow import parquet

from kvlab.data.sources.local_files import LocalFiles
from kvlab.data.text_formats import read_decompressed, read_documents
from kvlab.errors import DataError, SpecError, StoreError
from kvlab.spec import DataConfig, load_experiment
from kvlab.store import Store
from kvlab.store.record_archive import extract_archive
from tests.support.record_factory import Record

# Records in one file


def write_record(path, name, data=b"{}", kind=tarfile.REGTYPE):
    with tarfile.open(path, "w:xz") as archive:
        entry = tarfile.TarInfo(name)
        entry.size, entry.type, entry.linkname = len(data), kind, "/etc/passwd"
        archive.addfile(entry, io.BytesIO(data))
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("../outside.json", tarfile.REGTYPE),
        ("trials/0123456789abcdef/../../outside.json", tarfile.REGTYPE),
        ("trials/0123456789abcdef/result.json", tarfile.SYMTYPE),
        ("trials/0123456789abcdef/result.json", tarfile.LNKTYPE),
        ("trials/0123456789abcdef/result.json", tarfile.FIFOTYPE),
        ("trials/0123456789abcdef/a\x1b[2J.json", tarfile.REGTYPE),
        ("trials/0123456789abcdef/lock.1", tarfile.REGTYPE),
        ("sweeps/s/points/../../sweep.json", tarfile.REGTYPE),
        ("trainings/0123456789abcdef/checkpoints/step-00000004/.state.json", tarfile.REGTYPE),
        ("trunks/0123456789abcdef/step-00000004/a/b", tarfile.REGTYPE),
    ],
)
def test_a_record_has_the_names_of_a_store(tmp_path, name, kind):
    path = write_record(tmp_path / "a.tar.xz", name, kind=kind)
    with pytest.raises(StoreError, match="is not the record of a sweep: it holds") as caught:
        extract_archive(path, tmp_path / "record")
    assert "\x1b" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["a.tar.xz"]


def test_a_record_is_a_whole_file_of_limited_size(tmp_path):
    path = write_record(tmp_path / "a.tar.xz", "sweeps/s/sweep.json", bytes(1 << 26))
    with pytest.raises(StoreError, match="unpacks to more than 1,000 times its size"):
        extract_archive(path, tmp_path / "record")
    for content in (path.read_bytes()[:-40], b"no archive", b""):
        path.write_bytes(content)
        with pytest.raises(StoreError, match="is not the record of a sweep"):
            extract_archive(path, tmp_path / f"record of {len(content)}")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StoreError, match="no regular file"):
        extract_archive(path, tmp_path / "record")


def test_a_large_header_is_refused_unread(tmp_path):
    path = tmp_path / "a.tar.xz"
    with tarfile.open(path, "w:xz", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("x" * (1 << 24)))
    tracemalloc.start()
    with pytest.raises(StoreError, match="which is no plain file"):
        extract_archive(path, tmp_path / "record")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20, "8 MiB are the decompressor's"


def test_a_negative_size_is_refused(tmp_path):
    entry = tarfile.TarInfo("sweeps/s/sweep.json")
    entry.size = -tarfile.BLOCKSIZE  # it would lead a reader back to this header
    path = tmp_path / "a.tar.xz"
    path.write_bytes(lzma.compress(entry.tobuf(tarfile.GNU_FORMAT)))
    with pytest.raises(StoreError, match="of -512 bytes"):
        extract_archive(path, tmp_path / "record")


def test_the_memory_of_a_decompressor_is_limited(tmp_path):
    path = write_record(tmp_path / "a.tar.xz", "sweeps/s/sweep.json")
    of = {"dict_size": 1 << 28, "mode": lzma.MODE_FAST, "mf": lzma.MF_HC3, "nice_len": 8}
    data = lzma.decompress(path.read_bytes())
    path.write_bytes(lzma.compress(data, filters=[{"id": lzma.FILTER_LZMA2, **of}]))
    with pytest.raises(StoreError, match="Memory usage limit exceeded"):
        extract_archive(path, tmp_path / "record")


# Garbage


def test_garbage_collection_follows_no_link(tmp_path):
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    for name in (".hidden", "kept", "sub/.hidden"):
        (outside / name).write_text("mine")
    record = Record(factors={"heads": ("mha", "mqa")}, seeds=(0,))
    store = record.write(tmp_path / "real")
    trial = store.trial_directory(record.trial({"heads": "mha"}, 0))
    (trial / "attempts").symlink_to(outside)
    (trial / ".link").symlink_to(outside)
    training = store.training_directory(record.training({"heads": "mha"}, 0))
    for name in ("final", "checkpoints"):
        (training / name).mkdir(parents=True)
        (training / name / ".link").symlink_to(outside)
    (store.path / "trainings" / ("d" * 16)).symlink_to(outside)
    (store.path / "trials" / ("d" * 16)).symlink_to(outside)
    (tmp_path / "runs").symlink_to(store.path)  # a store behind a link is one all the same
    store = Store(tmp_path / "runs")
    gc = pytest.importorskip("kvlab.extensions.gc.garbage")
    found = gc.find_garbage(store, weights=True, unused=True, pruned=True)
    assert found
    assert all(gc.remove_garbage(item) for item in found)
    assert sorted(path.name for path in outside.rglob("*")) == [
        ".hidden", ".hidden", "kept", "sub",
    ]  # fmt: skip
    assert (tmp_path / "runs" / "sweeps" / "made" / "sweep.json").exists()


# Texts


def texts(*paths):
    return DataConfig(source="files", tokenizer="bytes", paths=tuple(map(str, paths)))


@pytest.mark.parametrize("kind", ["txt.gz", "jsonl.gz", "parquet", "hellaswag.jsonl.xz"])
def test_a_bomb_is_unpacked_to_a_limit(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("kvlab.data.text_formats.MIN_TEXT_LIMIT", 10_000)
    path = tmp_path / f"bomb.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.table({"text": ["a" * 100_000] * 200}), path, compression="zstd")
    elif kind == "hellaswag.jsonl.xz":
        path.write_bytes(lzma.compress(bytes(1 << 20)))
    else:
        line = b'{"text": "a"}\n' if "json" in kind else b"a" * 10
        path.write_bytes(gzip.compress(line * 60_000))
    with pytest.raises(DataError, match=r"bomb\..* unpacks to more than 200 times its size"):
        read_decompressed(path) if "hella" in kind else list(read_documents(path))


def test_a_line_has_an_end_and_a_mark_of_byte_order_is_no_text(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.data.text_formats.MAX_LINE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "' + "a" * 1000 + '"}\n')
    with pytest.raises(DataError, match=r"line 2: is longer than 1,000 bytes"):
        list(read_documents(path))
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert list(read_documents(tmp_path / "a.txt")) == ["hello"]


def test_pipes_devices_and_loops_are_no_text(tmp_path):
    for name, make in {
        "pipe.txt": os.mkfifo,
        "loop.txt": lambda path: os.symlink("loop.txt", path),
        "gone.txt": lambda path: os.symlink("nowhere", path),
        "zero.txt": lambda path: os.symlink("/dev/zero", path),
    }.items():
        folder = tmp_path / name[:4]
        folder.mkdir()
        (folder / "good.txt").write_text("text")
        make(folder / name)
        with pytest.raises(DataError, match="cannot be read|no regular file"):
            LocalFiles().identity(texts(folder))
        with pytest.raises(DataError, match="does not exist|a pipe or a device"):
            LocalFiles().identity(texts(folder / name))
    with pytest.raises(DataError, match="no regular file"):
        read_decompressed(tmp_path / "pipe" / "pipe.txt")
    (tmp_path / "pipe" / "pipe.txt").unlink()
    (tmp_path / "pipe" / "again").symlink_to(tmp_path / "pipe")  # a folder that contains itself
    assert len(list(LocalFiles().units(texts(tmp_path / "pipe"), print))) == 1


@pytest.mark.parametrize("head", [b"a\0b", b"\xff\xfea\0", b"\xed\xa0\x80", b"\xc3"])
def test_bytes_that_are_no_utf8_are_refused(tmp_path, head):
    (tmp_path / "a.txt").write_bytes(head + b"x" * 10)
    with pytest.raises(DataError, match="is not"):
        LocalFiles().identity(texts(tmp_path))


# Specs


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("name: !!python/object/apply:os.mkdir [ran]\n", "1:7: tag"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested deeper"),
        ("a: " + "{a: " * 32 + "}" * 32, "nested deeper than 32"),
        ("training: {tokens: " + "9" * 100_000 + "}\n", "1:20"),
        ("name: 'a\x1b[31m'\n", "1:1: has the character #x001b"),
        ("a: 1\n" * 100_000, "more than 20,000 keys and values"),
        ("a" * 1_000_001, "larger than"),
    ],
)
def test_a_spec_that_means_harm_is_refused_at_its_place(tmp_path, text, place):
    path = tmp_path / "e.yaml"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(SpecError) as error:
        load_experiment(str(path))
    assert time.process_time() - began < 3.0  # a second where nothing else runs
    assert place in str(error.value)
    assert not (tmp_path / "ran").exists()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SpecError, match="cannot be read"):
        load_experiment(str(path))


# Tables and pages
