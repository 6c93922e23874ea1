"""Findings: every figure and verdict is the record's, and a claim that nothing answers is refused.

`golden/claims.yaml` has the claims and `golden/findings.txt` their answers; the refusals of wrong
answers are in `golden/findings_errors.txt`. ``KVLAB_REWRITE_GOLDEN=1`` writes both texts again.
"""

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvlab.cli.main import main
from kvlab.errors import SpecError
from kvlab.extensions.findings.articles import article_claims
from kvlab.extensions.findings.claims import load_claims
from kvlab.extensions.findings.pages import make_findings, read_studies
from tests.support.golden import check_golden
from tests.support.record_factory import Record

GOLDEN = Path(__file__).parent / "golden"
SEEDS = (0, 1, 2, 3)
EFFECTS = {"mqa": 0.30, "rope": -0.20, "trained": 0.01}
FACTORS = {
    "heads": ("mha", "mqa"),
    "position": ("learned", "rope"),
    "sharing": ("none", "trained", "tied"),
}
HEADS = {"heads": ("mha", "mqa")}
RECORD = Record(factors=FACTORS, seeds=SEEDS, effects=EFFECTS, noise=1e-3)
HEAD = """\
articles:
- article: Caches
  address: https://example.org/caches
  claims:
"""
CLAIM = "  - claim: It is so.\n    answers:\n    - "
BOUNDED = f"{HEAD}{CLAIM}{{record: made, effect: heads=mqa, holds: bounded}}\n"
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


def write_record(project, record, name="made", **decide):
    """Commit the record of a sweep with a margin of 0.05, as reports/NAME/record.tar.xz."""
    path = project / "reports" / name / "record.tar.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    store = record.write(project / f"runs-{name}-{len(list(project.iterdir()))}")
    decided = {"margin": 0.05, **decide}
    store.write_sweep({**store.sweep(record.name), "decide": decided, "name": name})
    with tarfile.open(path, "w:xz", format=tarfile.USTAR_FORMAT) as archive:
        for folder in (store.sweep_directory(name), store.path / "trials"):
            for file in folder.rglob("*.json*"):
                archive.add(file, file.relative_to(store.path))


def spoil(result, levels, seed):
    """Let one training go wrong by less than the margin."""
    if levels["heads"] == "mqa" and seed == SEEDS[0]:
        for name in ("loss", "loss_served"):
            result["measurements"][name] += 1.0


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies")
    write_record(folder, RECORD)
    write_record(folder, RECORD, "claimed", claims=["sharing=trained"])
    write_record(folder, Record(factors=HEADS, effects={}, noise=1.0), "noisy")
    write_record(folder, Record(factors=HEADS, seeds=(0,)), "once")
    spoiled = Record(factors=HEADS, seeds=SEEDS, effects={}, noise=1e-3, change=spoil)
    write_record(folder, spoiled, "wrong", margin=5.0)
    return read_studies(folder / "reports", folder / "read")


def test_the_page_is_the_golden_one(studies):
    check_golden(
        GOLDEN / "findings.txt", make_findings(*load_claims(GOLDEN / "claims.yaml"), studies)
    )


def refuse(folder, studies, text):
    path = folder / "claims.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        make_findings(*load_claims(path), studies)
    return str(caught.value).replace(f"{folder}/", "")


def test_what_no_record_has_is_refused_with_its_place(tmp_path, studies):
    made = {"made": studies["made"]}
    lines = (GOLDEN / "findings_errors.txt").read_text(encoding="utf-8").splitlines()
    answers = [line.removeprefix("== ") for line in lines if line.startswith("== ")]
    refused = ((one, refuse(tmp_path, made, f"{HEAD}{CLAIM}{one}\n")) for one in answers)
    check_golden(
        GOLDEN / "findings_errors.txt", "".join(f"== {one}\n{why}\n" for one, why in refused)
    )
    note = f"{HEAD}  - {{claim: It takes 6.6 MB., note: It is 6.3 MB.}}\n"
    assert "claims.yaml:5:37: " in refuse(tmp_path, made, note)
    assert "has a figure; figures come from" in refuse(tmp_path, made, note)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Stand in a project with a sweep, its record and no page yet."""
    for folder in ("sweeps", "experiments", "reports"):
        (tmp_path / folder).mkdir()
    (tmp_path / "sweeps/made.yaml").write_text("question: What does a | cost?\n")
    (tmp_path / "sweeps/later.yaml").write_text("question: And later?\n")
    (tmp_path / "sweeps/README.md").write_text(TABLE)
    (tmp_path / "reports/claims.yaml").write_text(BOUNDED)
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path, RECORD)
    return tmp_path


def test_the_error_budget_names_sweeps_that_share_trainings(project):
    record = Record(factors=HEADS, seeds=SEEDS)
    write_record(project, record, "first")
    write_record(project, record, "second", alpha=0.01)
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
    assert made.endswith("| Smallest shown to cost less than 0.05 nats/token: rope+trained. |")
    assert later.endswith("| 9 minutes | none yet | not run |")
    assert other == "| typed | [made.yaml](made.yaml) |", "another kind of table"


EXACT_NUMBERS_OF_ARTICLES = [
    4_831_838_208,
    (1024 + 32 * 256) * 2 * 128 * 2,  # one global and 32 local slots of one head
    614_400 * 512,
    sum(3_109_942_400 * t + 307_200 * t**2 for t in range(256, 512)),
    5_242_880_000,
    48 * 7168 * 2 * 2 * 1024 * 128,
    48 * 7168 * 2 * 2 * 2048 * 128,
    2 * 12 * 12 * 768**2 + 2 * 50257 * 768 + 4 * 768 * 12 * 1024,  # matrices, head, attention
]


def test_numbers_that_findings_quote():
    assert [claim.exact for claim in article_claims()] == EXACT_NUMBERS_OF_ARTICLES
