"""Compare the losses of two reports of one sweep: ``python -m tests.compare_results NEW OLD``.

`make demo` says with it in what its report differs from the committed one.
"""

import csv
import sys
from pathlib import Path

LOSS = "measured.loss_served"


def compare_results(new: Path, old: Path) -> str:
    """Return one sentence: how many trials are the same, and by how much their losses differ.

    Args:
        new: Folder of a report.
        old: Folder of another one.
    """
    ours, theirs = _read_losses(new), _read_losses(old)
    common = ours.keys() & theirs.keys()
    if not common:
        text = f"{new} has other trials than {old}: the text of the installed packages differs,"
        return f"{text} or the recipe"
    most = max(abs(ours[trial] - theirs[trial]) for trial in common)
    losses = "are equal" if most == 0 else f"differ by at most {most:.2g} nats/token"
    text = f"{len(common)} of {len(ours)} trials are those of {old}: their losses {losses};"
    return f"{text} times are of the machine that each report names"


def _read_losses(folder: Path) -> dict[str, float]:
    """Return the served loss of every trial that has one, by its id."""
    with open(folder / "results.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["trial"]: float(row[LOSS]) for row in rows if row[LOSS]}


if __name__ == "__main__":
    print(compare_results(Path(sys.argv[1]), Path(sys.argv[2])))
