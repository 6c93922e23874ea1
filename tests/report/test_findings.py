"""Findings: every figure and verdict is the record's, and a claim that nothing answers is refused."""

from dataclasses import replace

import pytest

from kvlab.cli.main import main
from kvlab.errors import SpecError
from kvlab.report.findings import make_findings, read_studies
from kvlab.spec.claims import load_claims
from kvlab.store.record_archive import write_archive
from tests.support.record_factory import Record

SEEDS = (0, 1, 2, 3)
EFFECTS = {"mqa": 0.30, "rope": -0.20, "trained": 0.01}
FACTORS = {
    "heads": ("mha", "mqa"),
    "position": ("learned", "rope"),
    "sharing": ("none", "trained", "tied"),
}
RECORD = Record(factors=FACTORS, seeds=SEEDS, effects=EFFECTS, noise=1e-3)
BOUNDED = "{record: made, effect: heads=mqa, holds: bounded}"
HEAD = """\
articles:
- article: Caches
  address: https://example.org/caches
  claims:
"""
TABLE = """\
# Sweeps

| question | sweep | planned | report | verdict |
|---|---|---|---|---|
| typed | [made.yaml](made.yaml) | 3 minutes | [made](../reports/made/report.md) | typed by hand |
| typed | [later.yaml](later.yaml) | 9 minutes | none yet | typed by hand |

| question | answer |
|---|---|
| typed | [made.yaml](made.yaml) |
"""


def write_record(project, record, name="made", decide=None):
    """Commit the record of a sweep with a margin of 0.05, as reports/NAME/record.tar.xz."""
    path = project / "reports" / name / "record.tar.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    store = record.write(project / f"runs-{name}-{len(list(project.iterdir()))}")
    sweep = {**store.sweep(record.name), "decide": decide or {"margin": 0.05}, "name": name}
    store.write_sweep(sweep)
    write_archive(store, name, path)


def read_record(folder, record, decide=None):
    """Return the studies of a project with one record."""
    write_record(folder, record, decide=decide)
    return read_studies(folder / "reports", folder / "read")


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    return read_record(tmp_path_factory.mktemp("studies"), RECORD)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Stand in a project with a sweep, its record and no page yet."""
    for folder in ("sweeps", "experiments", "reports"):
        (tmp_path / folder).mkdir()
    (tmp_path / "sweeps/made.yaml").write_text("question: What does a | cost?\n")
    (tmp_path / "sweeps/later.yaml").write_text("question: And later?\n")
    (tmp_path / "sweeps/README.md").write_text(TABLE)
    write_claims(tmp_path / "reports", BOUNDED)
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path, RECORD)
    return tmp_path


def write_claims(folder, *answers, claim="  - claim: It is so."):
    text = "\n".join([claim, "    answers:" if answers else "", *(f"    - {a}" for a in answers)])
    (folder / "claims.yaml").write_text(f"{HEAD}{text}\n")


def find_rows(folder, studies, *answers, claim="  - claim: It is so."):
    """Write claims with these answers; return the rows of the page as lists of cells."""
    write_claims(folder, *answers, claim=claim)
    page = make_findings(*load_claims(folder / "claims.yaml"), studies)
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:]]


def number(text):
    return float(text.replace("\N{MINUS SIGN}", "-").split()[0].rstrip("\N{MULTIPLICATION SIGN}"))


def test_a_claim_holds_only_where_its_verdict_shows_it(tmp_path, studies):
    kinds = ("sharing=trained, holds: bounded", "position=rope, holds: bounded",
             "position=rope, holds: better", "sharing=trained, holds: better",
             "sharing=tied, holds: bounded")  # fmt: skip
    answers = [f"{{record: made, effect: {kind}}}" for kind in kinds]
    rows = find_rows(tmp_path, studies, *answers)
    assert [row[1].replace("*", "").partition(":")[0] for row in rows] == [
        "holds", "holds", "holds", "does not hold", "does not hold"
    ]  # fmt: skip
    assert [row[0] for row in rows] == ["It is so.", "", "", "", ""]
    noisy = Record(factors={"heads": ("mha", "mqa")}, effects={}, noise=1.0)
    (row,) = find_rows(tmp_path, read_record(tmp_path, noisy), BOUNDED)
    assert row[1] == "undecided"


def test_what_a_sweep_did_not_set_out_to_decide_is_explored_only(tmp_path):
    decide = {"margin": 0.05, "claims": ["sharing=trained"]}
    rows = find_rows(
        tmp_path,
        read_record(tmp_path / "claimed", RECORD, decide),
        BOUNDED,
        "{record: made, effect: sharing=trained, holds: bounded}",
        "{record: made, effect: heads=mqa, metric: loss}",
        "{record: made, quantity: ttft_ms}",
    )
    assert [row[1].partition(":")[0] for row in rows] == [
        "explored only", "**holds**", "explored only", "explored only"
    ]  # fmt: skip
    one_seed = Record(factors={"heads": ("mha", "mqa")}, seeds=(0,))
    (row,) = find_rows(tmp_path, read_record(tmp_path / "one", one_seed), BOUNDED)
    assert (row[1], row[4], row[6]) == ("explored only", "\N{EN DASH}", "1")


def test_a_cell_is_judged_against_its_reference(tmp_path, studies):
    answer = "{record: made, cell: {heads: mqa, sharing: tied}, holds: bounded}"
    (row,) = find_rows(tmp_path, studies, answer)
    assert row[1] == "**does not hold**: worse"
    assert row[2].endswith("`mqa+tied` against `baseline`, 8.00\N{MULTIPLICATION SIGN} smaller")
    assert number(row[3]) == pytest.approx(0.30 + 1.5, abs=0.01)


def test_figures_of_articles_are_compared_with_exact_ones(tmp_path, studies):
    stored = "record: made, quantity: kv_bytes_storage"
    ratio = f"{stored}, cell: {{heads: mqa}}, smaller_than: {{heads: mha}}"
    answers = {
        f"{stored}, says: 1.04e6": "holds",
        f"{stored}, says: 1.1e6": "does not hold",
        f"{ratio}, says: 4": "holds",
        'formula: "GPT-3 175B at 1,024 tokens, baseline"': "holds",  # 4.5 GiB
        f"{stored}, says: 1e6": "holds",  # 1 MiB: units of bytes may be binary
        f"{ratio}, says: 3.82": "does not hold",  # a ratio has no unit
        'formula: "30B, 128 sequences of 2,048 tokens"': "does not hold",  # it is twice as much
    }
    rows = find_rows(tmp_path, studies, *(f"{{{answer}}}" for answer in answers))
    assert [row[1].strip("*") for row in rows] == list(answers.values())
    assert rows[0][3:5] == ["1,048,576 bytes (1 MiB)", "exact"]
    assert rows[2][3] == "4.00\N{MULTIPLICATION SIGN} smaller"
    assert rows[3][3] == "4,831,838,208 bytes (4.5 GiB)"


def test_the_error_budget_names_sweeps_that_share_trainings(project):
    record = Record(factors={"heads": ("mha", "mqa")}, seeds=SEEDS)
    write_record(project, record, "first")
    write_record(project, record, "second", {"margin": 0.05, "alpha": 0.01})
    assert main(["findings"]) == 0
    page = (project / "reports/FINDINGS.md").read_text()
    assert "Each of 3 sweeps has an error budget of its own, 1% or 5%" in page
    assert "independent: first and second share 8 trainings." in page


def test_pages_follow_the_record_and_check_fails_until_they_do(project, capsys):
    assert main(["findings", "--check"]) == 1
    assert not (project / "reports/FINDINGS.md").exists(), "a check writes nothing"
    assert main(["findings"]) == 0
    assert main(["findings", "--check"]) == 0
    before = (project / "reports/FINDINGS.md").read_text()
    write_record(project, replace(RECORD, effects={**EFFECTS, "mqa": 0.0}))
    capsys.readouterr()
    assert main(["findings", "--check"]) == 1
    assert capsys.readouterr().out.count("run `kvlab findings`") == 2
    assert (project / "reports/FINDINGS.md").read_text() == before
    assert main(["findings"]) == 0
    after = (project / "reports/FINDINGS.md").read_text()
    assert "**does not hold**: worse" in before
    assert "**holds**: costs less than 0.05" in after
    (project / "reports/FINDINGS.md").write_text(after.replace("+0.", "+1."))
    assert main(["findings", "--check"]) == 1, "a figure was typed by hand"


def test_the_tables_of_sweeps_have_the_question_and_the_answer_of_the_report(project):
    assert main(["findings"]) == 0
    page = (project / "sweeps/README.md").read_text()
    made, later, other = (line for line in page.splitlines() if ".yaml" in line)
    start = r"| What does a \| cost? | [made.yaml](made.yaml) | 3 minutes | [made]("
    assert made.startswith(start)
    assert "typed" not in made + later
    assert made.endswith(" less than 0.05 nats/token is that of trained. |"), "one sentence"
    assert later.endswith("| 9 minutes | none yet | not run |")
    assert other == "| typed | [made.yaml](made.yaml) |", "another kind of table"
    assert "address" not in page
    findings = (project / "reports/FINDINGS.md").read_text()
    assert "## [Caches](https://example.org/caches)" in findings


@pytest.mark.parametrize(
    ("answer", "column", "message"),
    [
        ("{record: nade, effect: heads=mqa, holds: bounded}", 16, "did you mean made?"),
        ("{record: made, effect: heads=mqaa, holds: bounded}", 30, "did you mean heads=mqa?"),
        ("{record: made, effect: heads=mha, holds: bounded}", 30, "is no level of made that is"),
        ("{record: made, effect: heads=mqa, metric: lossy}", 49, "did you mean loss?"),
        ("{record: made, effect: heads=mqa, metric: loss_served}", 49, "beside the decided ones"),
        ("{record: made, trend: heads=mqa}", 29, "is no level with a trend in made; use one of"),
        ("{record: made, cell: {head: mqa}, holds: bounded}", 35, "use heads, position, sharing"),
        ("{record: made, cell: {heads: mq}, holds: bounded}", 36, "did you mean mqa?"),
        ("{record: made, cell: {heads: mha}, holds: bounded}", 28, "name another cell"),
        ("{record: made, quantity: kv_bytes}", 32, "did you mean kv_bytes_read?"),
        ('{formula: "Llama 7B, 10,000 tokens"}', 17, "did you mean Llama 7B at 10,000 tokens?"),
        ("{record: made, effect: heads=mqa}", 30, "write one of them"),
        ("{record: made, quantity: loss, holds: bounded}", 45, "does not go with quantity"),
        ("{effect: heads=mqa, holds: bounded}", 7, "lacks record; add it"),
        ("{record: made, holds: bounded}", 7, "names nothing that answers; add one of effect"),
        ("{record: made, effects: heads=mqa}", 22, "did you mean effect?"),
        ("{record: made, effect: heads=mqa, holds: cheap}", 48, "is not one of bounded, better"),
    ],
)
def test_what_no_record_has_is_refused_with_its_place(tmp_path, studies, answer, column, message):
    with pytest.raises(SpecError) as caught:
        find_rows(tmp_path, studies, answer)
    (line,) = str(caught.value).splitlines()
    assert f"claims.yaml:7:{column}: " in line
    assert message in line


def test_a_claim_without_an_answer_is_not_run_and_its_note_has_no_figures(tmp_path, studies):
    claim = "  - {claim: It takes 6.6 MB., note: It needs a GPU.}"
    (row,) = find_rows(tmp_path, studies, claim=claim)
    assert row[:2] == ["It takes 6.6 MB. *It needs a GPU.*", "not run"]
    with pytest.raises(SpecError, match=r"claims.yaml:5:37: .* has a figure; figures come from"):
        find_rows(tmp_path, studies, claim=claim.replace("needs a GPU", "is 6.3 MB"))


def test_an_effect_has_the_numbers_of_its_record(tmp_path, studies):
    (row,) = find_rows(tmp_path, studies, BOUNDED)
    claim, verdict, compared, figure, interval, texts, seeds, parameters = row
    effect = next(e for e in studies["made"].effects("loss_served") if "mqa" in e.name)
    assert (claim, verdict) == ("It is so.", "**does not hold**: worse")
    assert compared == "[made](made/report.md#what-each-level-does): `heads=mqa`, 6 settings"
    assert number(figure) == pytest.approx(effect.value, abs=5e-5)
    ends = [number(end) for end in interval.split(" to ")]
    assert ends == pytest.approx([effect.low, effect.high], abs=5e-5)
    assert (texts, seeds, parameters) == ("\N{EN DASH}", "4", "970 k to 1 M")
