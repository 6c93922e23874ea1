"""`--paper`: LaTeX that is balanced and escaped, figures that journals take, references in use."""

import re

import pytest

from kvlab.analysis.study import Study
from kvlab.errors import UsageError
from kvlab.report import write_report
from kvlab.report.paper import (
    COLUMN_WIDTH,
    PaperFolder,
    list_citations,
    write_methods,
    write_paper,
    write_table,
)
from kvlab.report.report_files import make_document
from kvlab.report.table_export import read_latex
from tests.report.reading import load
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
            "kv_dtype": "int4" if is_tied else "kivi2", "tie_rule": "overwrite",
            "tie": "adjacent:2" if is_tied else "none",
            "evict": {"keep": 8, "by": "heavy_hitters"} if is_tied else None,
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
    write_paper(study, make_document(study), PaperFolder(folder))


@pytest.fixture(scope="module")
def paper(tmp_path_factory):
    """A record, and the paper of it."""
    folder = tmp_path_factory.mktemp("paper")
    store = FullRecord(factors=FACTORS, seeds=tuple(range(6))).write(folder / "store")
    write(store, folder / "paper")
    return store, folder / "paper"


def cited_and_listed(folder):
    """Return what the text cites, and the entries of the bibliography."""
    bib = (folder / "made" / "references.bib").read_text()
    text = "".join(path.read_text() for path in (folder / "made").glob("*.tex"))
    return list_citations(text), re.findall(r"^@\w+\{([^,]+),", bib, re.MULTILINE)


def test_every_part_is_balanced_and_the_bibliography_holds_exactly_what_is_cited(paper):
    _, folder = paper
    for path in (folder / "main.tex", *sorted((folder / "made").glob("*.tex"))):
        assert_balanced(path.read_text())
    assert r"\input{made/ablation}" in (folder / "main.tex").read_text()
    cited, keys = cited_and_listed(folder)
    assert keys == cited
    assert {"shazeer2019mqa", "su2024roformer", "brandon2024cla", "holm1979procedure"} <= {*keys}
    assert not {"ainslie2023gqa", "beltagy2020longformer", "zellers2019hellaswag"} & {*keys}


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


def test_names_cannot_be_commands(tmp_path):
    record = FullRecord(factors={"heads": HOSTILE}, question=r"Is \write18{x} 100% safe?")
    study = load(record, tmp_path)
    for text in (write_table(study, COLUMN_WIDTH), write_methods(study)):
        assert_balanced(text)
        assert r"\input{evil}" not in text
        assert r"50\%" in text


def test_the_paper_of_a_search_has_its_best_configurations_and_how_it_was_done(tmp_path):
    store, folder = EVERY_OUTCOME.write(tmp_path / "store"), tmp_path / "paper"
    write(store, folder, None)
    own = folder / "made"
    for path in (folder / "main.tex", *sorted(own.glob("*.tex"))):
        assert_balanced(path.read_text())
    assert r"\input{made/configurations}" in (folder / "main.tex").read_text()
    table = (own / "configurations.tex").read_text()
    assert table.index("2 & 3.2000") < table.index("10 & 3.3000")
    assert "base & 3.6000" in table
    assert "the best is flattered by its selection" in table
    methods = (own / "methods.tex").read_text()
    for words in (
        r"n\_kv\_head of 1, 2 and 4; learning\_rate from 0.0001 to 0.1",
        r"Parzen estimator~\cite{bergstra2011algorithms}",
        "some are pruned, as in asynchronous successive halving",
        "Of 10 suggestions,",
    ):
        assert words in methods
    assert "ablation" not in methods
    assert "factorial" not in methods
    cited, keys = cited_and_listed(folder)
    assert keys == cited
    assert {path.stem for path in (own / "figures").glob("*.pdf")} == {
        "front-memory", "history-loss-served",
    }  # fmt: skip
    assert "the best 3.2000 nats/token, of trial 2" in (own / "figures.tex").read_text()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (SearchRecord(suggestions=[suggest(search_settings(1, 1e-3), "lost")]),
         "measured configuration within the limits, and made has"),
        (Record(seeds=(0,), status=lambda *_: "missing"), "no trial of made is done"),
    ],
)  # fmt: skip
def test_nothing_measured_is_no_paper(tmp_path, record, words):
    store = record.write(tmp_path / "store")
    with pytest.raises(UsageError, match=words):
        write_report(store, "made", tmp_path, ["answer"], PaperFolder(tmp_path / "paper"))
    assert not (tmp_path / "paper").exists()


def test_every_reference_has_its_use_and_every_field_of_a_term_its_sentence():
    names = ("references.bib", "methods.tex", "terms.tex")
    references, methods, terms = (read_latex(name) for name in names)
    keys = re.findall(r"^@\w+\{([^,]+),", references, re.M)
    assert keys == sorted(keys) == list_citations(methods + terms)
    fields = re.findall(r"^([a-z_]+): ", terms, re.M)
    assert all(f"!!{name}" in methods for name in fields)
