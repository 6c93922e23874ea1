"""`kvlab data`: what it prints, what it refuses, its exit codes."""

import json

import pytest

from kvlab.cli.main import main
from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.spec import load_experiment
from tests.support.text_files import stories, write_jsonl


@pytest.fixture(autouse=True)
def data_home(tmp_path, monkeypatch):
    folder = tmp_path / "kvlab-data"
    monkeypatch.setenv("KVLAB_DATA", str(folder))
    return folder


def run(capsys, *words):
    try:
        code = main(["data", *map(str, words)])
    except SystemExit as stop:  # argparse's own refusals
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def text(tmp_path):
    return write_jsonl(tmp_path / "text" / "a.jsonl", stories(100))


@pytest.fixture
def experiment(text):
    lines = [
        "name: tiny",
        "model: {vocab_size: 300, block_size: 32, n_layer: 1, n_head: 1, n_embd: 8}",
        f"data: {{source: files, paths: [{text.name}], tokenizer: bytes}}",
        "benchmark: {prompt_tokens: 4, new_tokens: 4}",
    ]
    path = text.parent / "tiny.yaml"
    path.write_text("\n".join(lines))
    return path


def test_prepare_a_source_then_list_then_verify(capsys, text):
    words = ["--paths", text, "--tokenizer", "gpt2:300", "--validation-fraction", "0.2", "--json"]
    code, out, _ = run(capsys, "prepare", "files", *words)
    made = json.loads(out)
    assert code == 0
    counts = [made["splits"][split]["documents"] for split in ("train", "validation")]
    assert sum(counts) == 100
    code, out, _ = run(capsys, "list", "--json")
    assert (code, json.loads(out)["datasets"]) == (0, [made])
    code, out, _ = run(capsys, "list")
    assert made["identity"][:16] in out
    code, out, _ = run(capsys, "verify", "--json")
    assert (code, json.loads(out)) == (0, {"checked": 1, "problems": []})


def test_preparing_an_experiment_makes_the_dataset_of_its_trials(capsys, experiment):
    code, out, _ = run(capsys, "prepare", experiment, "--max-bytes", "3e4")
    assert code == 0
    data = load_experiment(experiment, {"data.max_bytes": 30_000}).data
    assert prepare_dataset(data).digest in out


def test_verify_finds_a_changed_byte(capsys, text):
    _, out, _ = run(capsys, "prepare", "files", "--paths", text, "--json",
                    "--validation-fraction", "0.2")  # fmt: skip
    path = f"{json.loads(out)['folder']}/train.bin"
    with open(path, "r+b") as file:
        file.write(b"\xff")
    code, out, _ = run(capsys, "verify")
    assert code == 1
    assert path in out


def test_a_wrong_path_in_a_file_is_shown_with_its_place_as_in_a_plan(capsys, experiment):
    lines = experiment.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if "paths: [" in line)
    lines[number] = lines[number].replace("paths: [", "paths: [gone.txt, ")
    experiment.write_text("\n".join(lines))
    code, out, err = run(capsys, "prepare", str(experiment))
    column = lines[number].index("gone.txt") + 1
    assert (code, out) == (2, "")
    assert err.startswith(f"{experiment}:{number + 1}:{column}: data.paths.0 = ")
    assert "does not exist; name a file or a folder" in err


@pytest.mark.parametrize(
    ("word", "tokens"), [("2k", 2000), ("2000", 2000), ("0.002M", 2000), ("2e3", 2000)]
)
def test_prepare_stops_after_so_many_tokens(capsys, text, word, tokens):
    words = ["--paths", text, "--tokenizer", "bytes", "--validation-fraction", "0.3"]
    code, out, _ = run(capsys, "prepare", "files", *words, "--tokens", word, "--json")
    made = json.loads(out)
    assert (code, made["max_tokens"]) == (0, tokens)
    found = sum(split["tokens"] for split in made["splits"].values())
    assert tokens <= found < tokens + max(len(story.encode()) for story in stories(100)) + 1


@pytest.mark.parametrize("word", ["0", "-5", "1.5", "10T", "B", "1e99", "nan"])
def test_an_invalid_count_of_tokens_is_refused(capsys, text, word):
    assert run(capsys, "prepare", "files", "--paths", text, f"--tokens={word}")[0] == 2


def test_a_limit_above_the_text_warns_every_time_and_is_in_the_manifest(capsys, text):
    words = ["--paths", text, "--tokenizer", "bytes", "--validation-fraction", "0.3", "--json"]
    there = sum(len(story.encode()) + 1 for story in stories(100))
    said = f"data.max_tokens = 1,000,000 is more than there is: the whole text has {there:,} tokens"
    for _ in range(2):
        code, out, err = run(capsys, "prepare", "files", *words, "--tokens", "1M")
        made = json.loads(out)
        assert code == 0
        assert said in err
        assert made["short"].startswith(said)
        assert sum(split["tokens"] for split in made["splits"].values()) == there
    size = there - 100
    _, out, err = run(capsys, "prepare", "files", *words, "--max-bytes", size + 1)
    assert f"data.max_bytes = {size + 1:,} is more than there is" in err
    for enough in (["--max-bytes", size], ["--tokens", there], []):
        _, out, err = run(capsys, "prepare", "files", *words, *enough)
        assert "more than there is" not in err
        assert json.loads(out)["short"] is None


def test_the_licence_of_files_is_metadata(capsys, text):
    words = ["--paths", text, "--tokenizer", "bytes", "--validation-fraction", "0.3", "--json"]
    found = []
    for more in ([], ["--licence", "CC BY 4.0"], [], ["--licence", "CC0"]):
        code, out, _ = run(capsys, "prepare", "files", *words, *more)
        assert code == 0
        found.append(json.loads(out))
    licences = [made.pop("licence") for made in found]
    assert licences == ["not stated; say it with data.licence", "CC BY 4.0", "CC BY 4.0", "CC0"]
    assert all(made == found[0] for made in found), "one dataset, whatever its licence"
