"""`kvlab paper`: LaTeX that is balanced and escaped, figures that journals take, references in use."""

import re
from pathlib import Path

import pytest

from kvlab.analysis.study import Study
from kvlab.cli.main import main
from kvlab.extensions import paper as extension
from kvlab.extensions.paper.paper import (
    list_citations,
    read_latex,
    write_methods,
    write_paper,
    write_table,
)
from kvlab.own_extensions import find_files
from kvlab.report.report_files import make_document
from kvlab.report.table_export import COLUMN_WIDTH
from tests.report.reading import load
from tests.support.extensions import needs
from tests.support.golden import check_golden
from tests.support.mlflow_contents import read_files
from tests.support.record_factory import Record
from tests.support.search_record import EVERY_OUTCOME, SearchRecord, suggest
from tests.support.search_record import settings as search_settings

FACTORS = {"heads": ("mha", "mqa"), "sharing": ("none", "tied")}
HOSTILE = ("mha", r"50% & a_b #1 {x} \input{evil} $y$ ~^")


class FullRecord(Record):
    """A record whose experiments have the keys of a real one."""

    def result(self, levels, seed, status):
        found = super().result(levels, seed, status)
        heads = 1 if "mqa" in levels.values() else 4
        found["experiment"]["model"] = {
            "n_layer": 6, "n_head": 4, "n_kv_head": heads, "n_embd": 64, "block_size": 256,
            "position": "rope", "kv_sharing": "none", "window": None, "attention_pattern": "G",
        }  # fmt: skip
        is_tied = "tied" in levels.values()
        found["experiment"]["serving"] = {
            "kv_dtype": "int4" if is_tied else "model", "tie_rule": "overwrite",
            "tie": "adjacent:2" if is_tied else "none",
        }  # fmt: skip
        found["experiment"]["training"] |= {
            "batch_tokens": 4096, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1,
            "schedule": "cosine", "final_learning_rate": 3e-4,
            "kv_dtype": "int4" if is_tied else "model",
        }  # fmt: skip
        return found


def assert_balanced(tex: str) -> None:
    """Check braces, environments and mathematics, without escaped characters and comments."""
    plain = re.sub(r"\\[\\{}$%&#_]|(?m:^%.*$)", "", tex)
    depth = 0
    for character in plain:
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0
    assert plain.count("$") % 2 == 0
    opened = []
    for kind, name in re.findall(r"\\(begin|end)\{([^}]*)\}", plain):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened


def write(store, folder, sections=("pareto", "curves")) -> None:
    study = Study.load(store, "made", sections)
    write_paper(study, make_document(study), folder)


@pytest.fixture(scope="module")
def paper(tmp_path_factory):
    """A record, and the paper of it."""
    folder = tmp_path_factory.mktemp("paper")
    store = FullRecord(factors=FACTORS, seeds=tuple(range(6))).write(folder / "store")
    write(store, folder / "paper")
    return store, folder / "paper"


def check_paper(folder, name, table):
    """Compare the texts with the golden ones, and the bibliography with what they cite."""
    own = folder / "made"
    paths = (folder / "main.tex", *sorted(own.glob("*.tex")))
    for path in paths:
        assert_balanced(path.read_text())
    assert rf"\input{{made/{table}}}" in paths[0].read_text()
    text = "".join(f"%% {path.name}\n{path.read_text()}" for path in paths)
    check_golden(Path(__file__).parent / "golden" / f"{name}.tex", text)
    keys = re.findall(r"^@\w+\{([^,]+),", (own / "references.bib").read_text(), re.M)
    assert keys == list_citations(text)
    return sorted(path.stem for path in (own / "figures").glob("*.pdf"))


@needs("search")
def test_the_texts_are_the_golden_ones_and_the_bibliography_holds_what_they_cite(paper, tmp_path):
    assert check_paper(paper[1], "ablation", "ablation") == ["curves", "pareto"]
    write(EVERY_OUTCOME.write(tmp_path / "store"), tmp_path / "paper", None)
    figures = check_paper(tmp_path / "paper", "configurations", "configurations")
    assert figures == ["front-memory", "history-loss-served"]


def test_the_same_record_gives_the_same_bytes_with_figures_as_wide_as_a_column(paper, tmp_path):
    store, folder = paper
    write(store, tmp_path)
    first = read_files(folder)
    assert first == read_files(tmp_path)
    pictures = {name: pdf for name, pdf in first.items() if "figures/" in name}
    assert list(pictures) == ["made/figures/curves.pdf", "made/figures/pareto.pdf"]
    for pdf in pictures.values():
        assert b"/MediaBox [ 0 0 234 " in pdf
        assert b"/FontFile2" in pdf, "TrueType"
        assert b"/Type3" not in pdf
        assert b"CreationDate" not in pdf


@pytest.mark.parametrize(("metric", "scored"), [("loss_served", "7,936"), ("loss", "8,192")])
def test_tokens_are_those_that_were_trained_on_and_scored(tmp_path, metric, scored):
    """Not those asked for: steps, windows and documents are whole."""

    def change(found, *_):
        found["experiment"]["evaluation"] = {"loss_tokens": 8000}
        found["training_record"]["tokens"] = 612_352
        found["measurements"] |= {"loss_tokens": 8192, "served_tokens": 7936}

    record = FullRecord(factors=FACTORS, change=change)
    text = write_methods(load(record, tmp_path, decide={"metric": metric}))
    numbers = re.findall(r"[\d,]+(?= tokens of| held-out tokens)", text)
    assert numbers == ["612,352", scored]


def give_weights(found, *_):
    found["experiment"]["training"] |= {"tokens": 0, "init_from": "gpt2"}
    found["experiment"]["evaluation"] = {"text_parts": 3}
    found["training_record"] |= {"steps": 0, "tokens": 0}


def test_of_weights_that_were_given_no_training_is_told(tmp_path):
    text = write_methods(load(FullRecord(factors=FACTORS, change=give_weights), tmp_path))
    training = text.partition("\\paragraph{Training.}\n")[2].partition("\n\n")[0]
    assert training.splitlines() == [
        "The weights are those of gpt2, and nothing is trained; heads are mean-pooled into fewer"
        r" where a model has fewer~\cite{ainslie2023gqa}.",
        "They are scored on docstrings of installed Python packages.",
        "Each cell has 3 seeds.",
        "Each seed scores held-out documents of its own.",
    ]
    assert "Quality is the validation loss" in text
    assert "Differences are paired by seed" in text


@needs("muon")
def test_the_optimizer_is_that_of_the_record(tmp_path):
    def change(found, levels, _seed):
        name = "adamw" if levels["heads"] == "mha" else "muon"
        found["experiment"]["training"]["optimizer"] = name

    text = write_methods(load(FullRecord(factors=FACTORS, change=change), tmp_path / "both"))
    assert "optimizer is AdamW~\\cite{loshchilov2019adamw} and Muon~\\cite{jordan2024muon" in text
    alone = FullRecord(factors={"heads": ("mqa", "gqa")}, change=change)
    assert "optimizer is Muon~\\cite{jordan2024muon" in write_methods(load(alone, tmp_path / "one"))


def test_methods_of_a_users_file_are_not_those_of_others(tmp_path):
    def change(found, _levels, _seed):
        found["experiment"]["extensions"] = {"my_kv.py": "x = 1"}
        found["experiment"]["model"]["kv"] = "mine"
        found["experiment"]["serving"] |= {
            "kv_dtype": {"codes": {"bits": 3}}, "evict": {"keep": 8, "by": {"fading": {"rate": 0.9}}}
        }  # fmt: skip

    text = write_methods(load(FullRecord(factors=FACTORS, change=change), tmp_path))
    assert "attention~" not in text, "its heads are the file's matter"
    assert "The cache is also stored in codes (bits 3): in some by quantizers of our own." in text
    assert r"Methods of our own are in the files my\_kv.py, whose text the record has." in text


def test_cells_have_as_many_seeds_as_they_have(tmp_path):
    record = FullRecord(factors=FACTORS, seeds=(0, 1, 2, 3))
    cells = record.description(record.cells())["cells"]
    cells[0]["trials"] = dict(list(cells[0]["trials"].items())[:2])
    assert "Each cell has 2 to 4 seeds." in write_methods(load(record, tmp_path, cells=cells))


def test_names_cannot_be_commands(tmp_path):
    record = FullRecord(factors={"heads": HOSTILE}, question=r"Is \write18{x} 100% safe?")
    study = load(record, tmp_path)
    for text in (write_table(study, COLUMN_WIDTH), write_methods(study)):
        assert_balanced(text)
        assert r"\input{evil}" not in text
        assert r"50\%" in text


@pytest.mark.parametrize(
    ("record", "words"),
    [
        pytest.param(SearchRecord(suggestions=[suggest(search_settings(1, 1e-3), "lost")]),
                     "measured configuration within the limits", marks=needs("search")),
        (Record(seeds=(0,), status=lambda *_: "missing"), "no trial of made is done"),
    ],
)  # fmt: skip
def test_nothing_measured_is_no_paper(tmp_path, capsys, record, words):
    store = record.write(tmp_path / "store")
    assert main(["paper", "made", str(tmp_path / "paper"), "--store", str(store.path)]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "paper").exists()


def test_the_command_says_where_the_files_are(paper, capsys, tmp_path):
    store, _ = paper
    words = [
        "paper",
        "made",
        str(tmp_path / "paper"),
        "--store",
        str(store.path),
        "--width",
        "page",
    ]
    assert main(words) == 0
    parts, shown = capsys.readouterr().out.splitlines()
    assert "methods.tex" in parts
    assert shown.startswith(f"{tmp_path}/paper/main.tex shows them")
    assert b"/MediaBox [ 0 0 486 " in (tmp_path / "paper/made/figures/pareto.pdf").read_bytes()


def test_every_reference_has_its_use_and_every_field_of_a_term_its_sentence():
    names = ("references.bib", "methods.tex", "terms.tex")
    references, methods, terms = (read_latex(name) for name in names)
    keys = re.findall(r"^@\w+\{([^,]+),", references, re.M)
    assert sorted(set(keys)) == list_citations(methods + terms)
    for path in (Path(extension.__file__).parent / "latex" / names[0], *find_files(names[0])):
        own = re.findall(r"^@\w+\{([^,]+),", path.read_text(), re.M)
        assert own == sorted(set(own))
    fields = re.findall(r"^([a-z_]+): ", terms, re.M)
    assert all(f"!!{name}" in methods for name in fields)
