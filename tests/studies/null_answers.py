"""Move every loss a little: does the answer of a report keep its sentences?

    python -m tests.studies.null_answers [TRIES] [REPORT ...]

For each committed report, the losses of every training are moved by one number that is drawn evenly
within `MOVE`, about what another processor changes. Trials of the same weights move together; what
serving adds to a trial moves by up to a hundredth of itself, at most by `MOVE`. Looks are taken
again with the moved losses. The table has the share of tries whose first sentences are those of the
record but for numbers; under it stand the sentences, and the most frequent others with their counts.
"""

import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvlab.analysis.looks import TakenLook
from kvlab.analysis.sequential import ClaimState, Looks
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import TrialRow
from kvlab.report.document import Paragraph
from kvlab.report.overview import write_lead
from kvlab.store import Store
from kvlab.store.metrics import METRICS
from kvlab.store.record_archive import extract_archive

REPORTS = Path(__file__).parents[2] / "reports"
MOVE = 0.002
"""Largest change of a training's losses, in nats per token."""
LOSSES = ("loss", "loss_paired", "loss_served")
NUMBER = re.compile(r"[+\N{MINUS SIGN}-]?\b\d[\d.,]*(?:e[+-]?\d+)?")


def write_sentences(study: Study) -> tuple[str, ...]:
    """Return the first sentences of a report, with ``#`` for numbers outside of names."""
    return tuple(_mask(paragraph) for paragraph in write_lead(study))


def _mask(paragraph: Paragraph) -> str:
    return "".join(
        NUMBER.sub("#", span) if isinstance(span, str) else f"[{span.text}]"
        for span in paragraph.spans
    )


def move_rows(rows: Iterable[TrialRow], random: np.random.Generator) -> list[TrialRow]:
    """Return rows with the losses of every training moved."""
    moves: dict[str, float] = {}
    added: dict[str, float] = {}
    moved = []
    for row in rows:
        measured = dict(row.measurements)
        if row.is_done and row.training:
            move = moves.setdefault(row.training, random.uniform(-MOVE, MOVE))
            most = min(MOVE, abs(measured.get("serving_gap", 0.0)) / 100)
            gap = added.setdefault(row.trial, random.uniform(-most, most))
            measured |= {name: measured[name] + move for name in LOSSES if name in measured}
            if most:
                measured["loss_served"] += gap
                measured["serving_gap"] += gap
        moved.append(replace(row, measurements=measured))
    return moved


def take_looks(store: Store, study: Study) -> list[TakenLook]:
    """Take the looks of a sweep again, at the losses that it has."""
    declared, metric = study.declared_looks, study.primary_metric
    assert declared is not None, "only of sweeps with looks"
    states = {claim: ClaimState() for claim in study.claims}
    rule = Looks(
        declared.looks,
        len(states),
        study.decide.alpha,
        study.decide.margin,
        METRICS[metric].better,
    )
    taken = []
    for look in study.taken_looks:
        seeds = set(declared.seeds(look.seeds))
        then = Study(store, study.sweep, [row for row in study.rows if row.seed in seeds])
        effects = {effect.claim: effect for effect in then.mean_effects(metric)}
        values = {claim: [value for _, value in effects[claim].by_seed] for claim in states}
        states = rule.take(states, values)
        taken.append(TakenLook(look.number, look.seeds, metric, states))
    return taken


def find_looks_of_others(store: Store, study: Study) -> set[str]:
    """Return the claims whose recorded looks were taken at another mean than the effects have."""
    if not study.taken_looks:
        return set()
    again, states = take_looks(store, study)[-1].states, study.taken_looks[-1].states
    return {c for c in states if not math.isclose(states[c].value, again[c].value, abs_tol=1e-9)}


def move_study(store: Store, study: Study, kept: set[str], random: np.random.Generator) -> Study:
    """Return a study with moved losses; the claims in ``kept`` have their recorded looks."""
    moved = Study(store, study.sweep, move_rows(study.rows, random), study.sections)
    if not study.taken_looks:
        return moved
    taken = [
        replace(new, states={c: (old if c in kept else new).states[c] for c in new.states})
        for old, new in zip(study.taken_looks, take_looks(store, moved), strict=True)
    ]
    looks = {**study.sweep["looks"], "taken": [look.to_json() for look in taken]}
    return Study(store, {**study.sweep, "looks": looks}, moved.rows, study.sections)


def main(tries: int, names: list[str]) -> None:
    print(f"| report | same in {tries} | otherwise |\n|---|---|---|")
    for name in names or sorted(path.parent.name for path in REPORTS.glob("*/record.tar.xz")):
        with tempfile.TemporaryDirectory() as folder:
            store = extract_archive(REPORTS / name / "record.tar.xz", Path(folder))
            study = Study.load(store, name)
            if study.search is not None or study.is_untrained or len(study.seeds) == 1:
                continue  # nothing is judged
            kept, random = find_looks_of_others(store, study), np.random.default_rng(0)
            found = Counter(
                write_sentences(move_study(store, study, kept, random)) for _ in range(tries)
            )
        own = write_sentences(study)
        others = [(count, text) for text, count in found.most_common() if text != own]
        print(f"| {name} | {found[own] / tries:.1%} | |", flush=True)
        for text in own:
            print(f"    {text}")
        for count, other in others[:4]:
            for text in other:
                if text not in own:
                    print(f"  {count:4} {text}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200, sys.argv[2:])
