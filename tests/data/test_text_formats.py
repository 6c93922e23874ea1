"""Documents are read from files of other programs; errors in damaged files name the location."""

from itertools import chain

import pyarrow as pa
import pytest
from pyarrow import parquet

from kvlab.data import text_formats
from kvlab.data.text_formats import read_documents, split_file, split_text
from kvlab.errors import DataError
from tests.support.text_files import PACKINGS, stories, write_jsonl, write_parquet

TEXTS = ["plain", "två rader\nhär", "猫 👍", "<|endoftext|>", 'quoted "x" \\ \t']


def read(path):
    return [text for part in split_file(path) for text in read_documents(path, part)]


@pytest.mark.parametrize("packing", PACKINGS)
def test_jsonl_and_txt(tmp_path, packing):
    path = write_jsonl(tmp_path / f"a.jsonl{packing}", TEXTS, packing)
    assert read(path) == TEXTS
    path.write_bytes(path.read_bytes() * 2)  # compressed streams may follow each other
    assert read(path) == TEXTS * 2
    assert (text_formats.estimate_text_bytes(path, 100) == 100) == (not packing)
    path.write_bytes(PACKINGS[packing](b'{"text": "a"}\n\n  \n{"text": "b"}'))
    assert read(path) == ["a", "b"], "blank lines are skipped"
    path = tmp_path / f"A.TXT{packing}"
    path.write_bytes(PACKINGS[packing]("\ufeffone\r\ntwo é\n\nthree".encode()))
    assert read(path) == ["one\ntwo é\n\nthree"]


@pytest.mark.parametrize("row_group_size", [None, 2])
def test_parquet(tmp_path, row_group_size):
    path = write_parquet(tmp_path / "a.parquet", [*TEXTS, None, "last"], row_group_size)
    assert read(path) == [*TEXTS, "last"]


@pytest.mark.parametrize("unit", [1, 7, 64, 500, 10**6])
def test_parts_of_a_file_hold_every_document_once(tmp_path, monkeypatch, unit):
    monkeypatch.setattr(text_formats, "UNIT_BYTES", unit)
    texts = stories(40, words=5)
    jsonl = write_jsonl(tmp_path / "a.jsonl", texts)
    table = write_parquet(tmp_path / "a.parquet", texts, row_group_size=3)
    assert read(jsonl) == texts
    assert read(table) == texts
    assert (len(split_file(jsonl)) > 1) == (unit < jsonl.stat().st_size)


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
def test_a_truncated_file_is_refused(tmp_path, packing):
    path = write_jsonl(tmp_path / f"a.jsonl{packing}", stories(500), packing)
    raw = path.read_bytes()
    for kept in (0.5, 0.99):
        path.write_bytes(raw[: int(len(raw) * kept)])
        with pytest.raises(DataError, match="cut off"):
            read(path)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ('{"text": 3}', "no field text"),
        ('{"text": "cut', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_errors_in_jsonl_name_the_line(tmp_path, line, rule):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(DataError, match=rf"line 2: .*{rule}"):
        read(path)


@pytest.mark.parametrize(
    ("name", "raw", "rule"),
    [
        *((name, b"not at all what the name says" * 10, "a\\.")
          for name in ("a.jsonl.gz", "a.txt.xz", "a.jsonl.zst", "a.parquet")),
        ("a.txt", b"caf\xe9 au lait", "not UTF-8 at byte 3"),
    ],
)  # fmt: skip
def test_bytes_other_than_the_suffix_says_are_refused(tmp_path, name, raw, rule):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match=rule):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("columns", "rule"), [({"body": ["x"], "n": [1]}, "body, n"), ({"text": [1]}, "int64")]
)
def test_parquet_without_a_column_of_text_is_refused(tmp_path, columns, rule):
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rule):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("lengths", [[50], [3_000], [40_000], [3_000, 30_000]])
def test_only_a_large_text_becomes_parts_at_blank_lines(lengths):
    assert list(split_text("x" * 1_000_000)) == ["x" * 1_000_000]
    assert max(map(len, split_text("x" * 1_000_001))) == 16_000, "without any break"
    count = 1_400_000 // sum(lengths)
    paragraphs = zip(*(stories(count, words=length // 10) for length in lengths), strict=True)
    text = "\n\n".join(chain(*paragraphs))
    assert len(text) > 1_000_000
    parts = list(split_text(text))
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert max(map(len, parts)) <= 16_100
    assert sum(len(part) < 4_000 for part in parts) <= len(parts) * 0.35
