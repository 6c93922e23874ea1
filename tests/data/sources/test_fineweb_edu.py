"""`fineweb-edu-*`: from a local folder, and from a simulated hub."""

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvlab.data import dataset_identity, prepare_dataset
from kvlab.errors import DataError
from kvlab.spec import DataConfig
from tests.contracts.source_contract import SourceContract
from tests.support.text_files import documents, stories, write_parquet

DATA = DataConfig(source="fineweb-edu-10b", tokenizer="bytes", validation_fraction=0.3)
REVISION = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import json, sys
from kvlab.data import dataset_identity, prepare_dataset
from kvlab.errors import KvlabError
from kvlab.spec import DataConfig
data = DataConfig(source="fineweb-edu-10b", tokenizer="bytes", validation_fraction=0.3,
                  max_bytes=json.loads(sys.argv[1]))
try:
    dataset = prepare_dataset(data, workers=1)
    print(json.dumps({"digest": dataset.digest, "identity": dataset_identity(data)}))
except KvlabError as error:
    print(json.dumps({"error": str(error)}))
"""


def write_local_sample(data_home, sample="10BT"):
    folder = data_home / "fineweb-edu" / "sample" / sample
    write_parquet(folder / "000_00000.parquet", stories(60), row_group_size=10)
    write_parquet(folder / "001_00000.parquet", stories(60, seed=1), row_group_size=10)
    return folder


class TestFineWebEduContract(SourceContract):
    @pytest.fixture
    def data(self, data_home):
        write_local_sample(data_home)
        return DATA


def test_local_files_are_read_in_the_order_of_the_repository(data_home):
    write_local_sample(data_home)
    dataset = prepare_dataset(DATA, workers=1)
    published = [*stories(60), *stories(60, seed=1)]
    train, held_out = documents(dataset.train, "bytes"), documents(dataset.validation, "bytes")
    assert sorted([*train, *held_out]) == sorted(published)
    assert train == [text for text in published if text in set(train)]
    assert "ODC-By" in dataset.licence


def test_max_bytes_takes_the_beginning(data_home):
    write_local_sample(data_home)
    published = stories(60)
    limit = sum(len(text.encode()) for text in published[:30])
    dataset = prepare_dataset(DATA.model_copy(update={"max_bytes": limit}), workers=2)
    taken = [*documents(dataset.train, "bytes"), *documents(dataset.validation, "bytes")]
    assert sorted(taken) == sorted(published[:30])


def test_max_tokens_takes_the_beginning(data_home):
    write_local_sample(data_home)
    published = stories(60)
    limit = sum(len(text.encode()) + 1 for text in published[:30])  # an end of text each
    for count, documents_read in ((limit, 30), (limit + 1, 31)):
        dataset = prepare_dataset(DATA.model_copy(update={"max_tokens": count}), workers=2)
        taken = [*documents(dataset.train, "bytes"), *documents(dataset.validation, "bytes")]
        assert sorted(taken) == sorted(published[:documents_read])


def test_a_crawl_is_read_whole_and_sampled_fairly(data_home):
    folder = data_home / "fineweb-edu" / "data" / "CC-MAIN-2024-10"
    write_parquet(folder / "train-00000-of-00001.parquet", stories(60), row_group_size=10)
    facts = {"source": "fineweb-edu-crawl", "tokenizer": "bytes", "validation_fraction": 0.3}
    one = DataConfig(subset="CC-MAIN-2024-10", **facts)
    dataset = prepare_dataset(one, workers=1)
    assert dataset.train_documents + dataset.validation_documents == 60
    assert dataset.licence.startswith("ODC-By")
    some = prepare_dataset(one.model_copy(update={"max_tokens": 3000}), workers=1)
    taken = documents(some.train, "bytes") + documents(some.validation, "bytes")
    assert 1 < len(taken) < 60
    assert set(taken) <= set(stories(60))
    assert taken[0] != stories(60)[0], "in the order of their hash, not of the file"
    other = one.model_copy(update={"subset": "CC-MAIN-2023-50"})
    with pytest.raises(DataError, match="data/CC-MAIN-2023-50"):
        dataset_identity(other)


def test_identity_follows_the_files(data_home):
    folder = write_local_sample(data_home)
    before = dataset_identity(DATA)
    write_parquet(folder / "002_00000.parquet", stories(5, seed=2))
    assert dataset_identity(DATA) != before


def test_a_file_of_another_size_than_listed_is_refused(data_home):
    folder = write_local_sample(data_home)
    files = [[path.name, path.stat().st_size] for path in sorted(folder.glob("*.parquet"))]
    files[1][1] += 1
    (folder / "listing.json").write_text(json.dumps({"revision": REVISION, "files": files}))
    with pytest.raises(DataError, match="001_00000"):
        prepare_dataset(DATA, workers=1)


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as listing and downloading a public dataset takes."""

    root: Path
    served: list[str]
    api = "/api/datasets/HuggingFaceFW/fineweb-edu"
    files = f"/datasets/HuggingFaceFW/fineweb-edu/resolve/{REVISION}/"

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, body):
        path = self.path.split("?")[0].replace("%2F", "/")
        if path == f"{self.api}/tree/{REVISION}/sample/10BT":
            found = sorted((self.root / "sample" / "10BT").glob("*.parquet"))
            entries = [{"type": "file", "path": f"sample/10BT/{file.name}", "oid": "0" * 40,
                        "size": file.stat().st_size} for file in found]  # fmt: skip
            self._send(json.dumps(entries).encode(), body)
        elif path in (self.api, f"{self.api}/revision/main"):
            about = {"id": "HuggingFaceFW/fineweb-edu", "sha": REVISION, "siblings": []}
            self._send(json.dumps(about).encode(), body)
        elif path.startswith(self.files):
            name = path.removeprefix(self.files)
            if body:
                self.served.append(name)
            self._send((self.root / name).read_bytes(), body)
        else:
            self.send_error(404)

    def _send(self, raw, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("ETag", f'"{len(raw):x}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if body:
            self.wfile.write(raw)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    published = write_local_sample(tmp_path / "published")
    handler = type("ThisHub", (Hub,), {"root": published.parent.parent, "served": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.served
    server.shutdown()
    thread.join()
    server.server_close()


def prepare_in_process(endpoint, max_bytes="null"):
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", SCRIPT, max_bytes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_hub_files_are_listed_downloaded_and_kept(hub, data_home):
    endpoint, served = hub
    first = prepare_in_process(endpoint)
    assert served == ["sample/10BT/000_00000.parquet", "sample/10BT/001_00000.parquet"]
    folder = data_home / "fineweb-edu" / "sample" / "10BT"
    assert json.loads((folder / "listing.json").read_text())["revision"] == REVISION
    shutil.rmtree(data_home / "datasets")
    assert prepare_in_process("http://127.0.0.1:9") == first  # no hub any more
    assert len(served) == 2


def test_only_the_files_that_max_bytes_needs_are_downloaded(hub):
    endpoint, served = hub
    assert "digest" in prepare_in_process(endpoint, "10000")
    assert served == ["sample/10BT/000_00000.parquet"]


def test_without_hub_or_files_the_error_gives_a_hint():
    answer = prepare_in_process("http://127.0.0.1:9")
    assert "HuggingFaceFW/fineweb-edu cannot be reached" in answer["error"]
    assert "sample/10BT/*.parquet" in answer["error"]
