"""`kvlab data`: what it prints, what it refuses, its exit codes."""

import json
from pathlib import Path

import pytest

from kvlab.cli.main import main
from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.spec import load_experiment
from tests.support.text_files import stories, write_jsonl

EXPERIMENT = """\
name: tiny
model: {vocab_size: 300, block_size: 32, n_layer: 1, n_head: 1, n_embd: 8}
data: {source: files, paths: [a.jsonl], tokenizer: bytes}
benchmark: {prompt_tokens: 4, new_tokens: 4}
"""


@pytest.fixture
def prepare(tmp_path, monkeypatch, capsys):
    """Call ``kvlab data ACTION`` beside a text; give its code, its output and its errors."""
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "kvlab-data"))
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", stories(100))

    def run(*words, action="prepare"):
        code = main(["data", action, *map(str, words)])
        return code, *capsys.readouterr()

    return run


def change(**values):
    """Return the options that change keys of `data`."""
    return [word for key, value in values.items() for word in ("--set", f"data.{key}={value}")]


FILES = ("files", "--json", *change(paths="[a.jsonl]", validation_fraction=0.3))
BYTES = (*FILES, *change(tokenizer="bytes"))


def test_prepare_a_source_then_list_then_verify_which_finds_a_changed_byte(prepare):
    code, out, _ = prepare(*FILES, *change(tokenizer="gpt2:300"))
    made = json.loads(out)
    assert code == 0
    assert sum(made["splits"][split]["documents"] for split in ("train", "validation")) == 100
    code, out, _ = prepare("--json", action="list")
    assert (code, json.loads(out)["datasets"]) == (0, [made])
    assert made["identity"][:16] in prepare(action="list")[1]
    code, out, _ = prepare("--json", action="verify")
    assert (code, json.loads(out)) == (0, {"checked": 1, "problems": []})
    path = f"{made['folder']}/train.bin"
    with open(path, "r+b") as file:
        file.write(b"\xff")
    code, out, _ = prepare(action="verify")
    assert (code, path in out) == (1, True)


def test_a_damaged_manifest_does_not_hide_the_other_datasets(prepare):
    kept = json.loads(prepare(*BYTES)[1])
    other = json.loads(prepare(*BYTES, *change(max_bytes="5e3"))[1])
    path = Path(other["folder"]) / "manifest.json"
    path.write_text("{")
    code, out, _ = prepare("--json", action="list")
    assert (code, json.loads(out)["datasets"]) == (0, [kept])
    code, out, _ = prepare(action="list")
    assert code == 0
    assert kept["identity"][:16] in out
    assert f"{path} is damaged" in out


def test_preparing_an_experiment_makes_the_dataset_of_its_trials(prepare, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(EXPERIMENT)
    code, out, _ = prepare(path, *change(max_bytes="3e4"))
    assert code == 0
    data = load_experiment(path, {"data.max_bytes": 30_000}).data
    assert prepare_dataset(data).digest in out
    path.write_text(EXPERIMENT.replace("[a.jsonl]", "[gone.txt, a.jsonl]"))
    code, out, err = prepare(path)
    assert (code, out) == (2, "")
    assert err.startswith(f"{path}:3:31: data.paths.0 = "), "as in a plan"
    assert "does not exist; name a file or a folder" in err


def test_prepare_stops_after_so_many_tokens(prepare):
    code, out, _ = prepare(*BYTES, *change(max_tokens="2e3"))
    made = json.loads(out)
    assert (code, made["max_tokens"]) == (0, 2000)
    found = sum(split["tokens"] for split in made["splits"].values())
    assert 2000 <= found < 2001 + max(len(story.encode()) for story in stories(100))


def test_a_limit_above_the_text_warns_every_time_and_is_in_the_manifest(prepare):
    there = sum(len(story.encode()) + 1 for story in stories(100))
    said = f"data.max_tokens = 1,000,000 is more than there is: the whole text has {there:,} tokens"
    for _ in range(2):
        _, out, err = prepare(*BYTES, *change(max_tokens="1e6"))
        assert said in err
        assert json.loads(out)["short"].startswith(said)
    size = there - 100
    assert (
        f"data.max_bytes = {size + 1:,} is more" in prepare(*BYTES, *change(max_bytes=size + 1))[2]
    )
    for enough in (change(max_bytes=size), change(max_tokens=there)):
        _, out, err = prepare(*BYTES, *enough)
        assert ("more than there is" in err, json.loads(out)["short"]) == (False, None)


def test_the_licence_of_files_is_metadata(prepare):
    words = ([], change(licence="CC BY 4.0"), [], change(licence="CC0"))
    found = [json.loads(prepare(*BYTES, *more)[1]) for more in words]
    licences = [made.pop("licence") for made in found]
    own = "not stated; say it with data.licence"
    assert licences == [own, "CC BY 4.0", own, "CC0"]
    assert all(made == found[0] for made in found), "one dataset, whatever its licence"
