"""`fineweb-edu-*`: from a local folder, and from a simulated hub."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.hf_api import RepoFile

from kvlab.data.dataset_preparation import dataset_identity, prepare_dataset
from kvlab.data.shards import read_manifest
from kvlab.errors import DataError
from kvlab.spec import DataConfig
from tests.contracts.source_contract import SourceContract
from tests.support.text_files import documents, stories, write_parquet

DATA = DataConfig(source="fineweb-edu-10b", tokenizer="bytes", validation_fraction=0.3)
CRAWL = "CC-MAIN-2024-10"
REVISION = "0123456789abcdef0123456789abcdef01234567"


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


@pytest.mark.parametrize("unit", ["max_bytes", "max_tokens"])
def test_a_limit_takes_the_beginning(data_home, unit):
    write_local_sample(data_home)
    published = stories(60)
    # a token is a byte, and each document has an end of text
    limit = sum(len(text.encode()) + (unit == "max_tokens") for text in published[:30])
    for count, read in ((limit, 30), (limit + 1, 31)):
        dataset = prepare_dataset(DATA.model_copy(update={unit: count}), workers=count - limit + 1)
        taken = [*documents(dataset.train, "bytes"), *documents(dataset.validation, "bytes")]
        assert sorted(taken) == sorted(published[:read])


def test_a_crawl_is_read_whole_and_sampled_fairly(data_home):
    folder = data_home / "fineweb-edu" / "data" / "CC-MAIN-2024-10"
    write_parquet(folder / "train-00000-of-00001.parquet", stories(60), row_group_size=10)
    facts = {"source": "fineweb-edu-crawl", "tokenizer": "bytes", "validation_fraction": 0.3}
    one = DataConfig(subset="CC-MAIN-2024-10", **facts)
    dataset = prepare_dataset(one, workers=1)
    assert sum(one["documents"] for one in read_manifest(dataset.folder)["splits"].values()) == 60
    assert dataset.licence.startswith("ODC-By")
    some = prepare_dataset(one.model_copy(update={"max_tokens": 3000}), workers=1)
    taken = documents(some.train, "bytes") + documents(some.validation, "bytes")
    assert 1 < len(taken) < 60
    assert set(taken) <= set(stories(60))
    assert taken[0] != stories(60)[0], "in the order of their hash, not of the file"
    other = one.model_copy(update={"subset": "CC-MAIN-2023-50"})
    with pytest.raises(DataError, match="data/CC-MAIN-2023-50"):
        dataset_identity(other)


def test_identity_follows_the_files_and_their_listed_sizes_hold(data_home):
    folder = write_local_sample(data_home)
    before = dataset_identity(DATA)
    write_parquet(folder / "002_00000.parquet", stories(5, seed=2))
    assert dataset_identity(DATA) != before
    files = [[path.name, path.stat().st_size] for path in sorted(folder.glob("*.parquet"))]
    files[1][1] += 1
    (folder / "listing.json").write_text(json.dumps({"revision": REVISION, "files": files}))
    with pytest.raises(DataError, match="001_00000"):
        prepare_dataset(DATA)


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A hub in place of the library's, and the files that it served."""
    root, names = write_local_sample(tmp_path / "published").parent.parent, []

    def list_tree(_api, _repository, folder, **_):
        files = sorted((root / folder).glob("*.parquet"))
        return [
            RepoFile(path=f"{folder}/{file.name}", size=file.stat().st_size, oid="0")
            for file in files
        ]

    def download(_repository, name, *, revision, local_dir, **_):
        assert revision == REVISION
        names.append(name)
        target = Path(local_dir, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, target)

    info = SimpleNamespace(sha=REVISION)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: info)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", list_tree)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return names


def test_hub_files_are_listed_downloaded_and_kept(served, data_home, monkeypatch):
    prepare_dataset(DATA.model_copy(update={"max_bytes": 10_000}))
    assert served == ["sample/10BT/000_00000.parquet"], "more is not needed"
    first = prepare_dataset(DATA)
    assert served == ["sample/10BT/000_00000.parquet", "sample/10BT/001_00000.parquet"]
    folder = data_home / "fineweb-edu" / "sample" / "10BT"
    assert json.loads((folder / "listing.json").read_text())["revision"] == REVISION
    shutil.rmtree(data_home / "datasets")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", None)  # no hub any more
    assert prepare_dataset(DATA).digest == first.digest
    assert len(served) == 2
    shutil.rmtree(data_home)
    with pytest.raises(DataError, match=r"cannot be reached.*sample/10BT/\*\.parquet"):
        prepare_dataset(DATA)
