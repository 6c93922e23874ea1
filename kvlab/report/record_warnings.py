"""What the record says against comparing its trials: mixed code, texts or tokenizers, leaks."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlab.analysis.study import Study
from kvlab.report import texts
from kvlab.report.document import Content, Paragraph, Span
from kvlab.report.table_columns import join_names


def report_damage(study: Study) -> list[Paragraph]:
    """Say which trials and files of the record are not what was written, if any."""
    damaged = [row.levels for row in study.rows if row.status == "damaged"]
    if not damaged and not study.damaged_files:
        return []
    cells = [study.label(levels) for levels in dict.fromkeys(damaged)]
    return [texts.write("damaged", study=study, n=len(damaged), cells=join_names(cells))]


Record = Mapping[str, Any]

ACCEPTED_OVERLAP = 0.01

CODE_FACTS = ("training code", "measuring code")
"""Digests, see `kvlab.trial.code_identity`; a warning of its own says where they differ."""


def list_confounds(study: Study) -> Iterator[tuple[Span, ...]]:
    """Yield what keeps losses of different cells from being compared."""
    data = ((row.record.get("provenance") or {}).get("data") for row in study.done_rows)
    n_texts = len({one["digest"] for one in data if one})
    if n_texts > 1:
        yield (f"Confounded: the cells were trained on {n_texts} different texts.",)
    if len(study.tokenizers) > 1:
        yield texts.spans("other tokenizers")


def list_warnings(study: Study) -> Iterator[Content]:
    """Say what limits all comparisons: mixed records, uncommitted code, text that leaked."""
    recorded = [row.record["provenance"] for row in study.rows if row.record.get("provenance")]
    counts = count_values(recorded)
    several = [name for name, values in counts.items() if len(values) > 1]
    mixed = ", ".join(name for name in several if name not in CODE_FACTS)
    if mixed:
        yield texts.write("mixed record", facts=mixed)
    if study.other_code:
        names = dict.fromkeys(study.label(row.levels) for row in study.other_code)
        trials = {row.trial: row.code for row in study.rows if row.record.get("provenance")}
        unknown = sum(code is None for code in trials.values())
        fields = {"cells": join_names(list(names)), "n": len(trials), "unknown": unknown}
        yield texts.write("mixed code", study=study, **fields)
    if sizes := study.undeclared_looks:
        yield texts.write("seeds added after a report", sizes=sizes)
    if "yes" in counts.get("uncommitted changes", {}):
        yield texts.write("uncommitted code")
    overlaps = [(record.get("data") or {}).get("overlap") or {} for record in recorded]
    worst = max((shares[max(shares, key=int)] for shares in overlaps if shares), default=0.0)
    if worst > ACCEPTED_OVERLAP:
        yield texts.write("leaked text", share=worst)


def count_values(recorded: Sequence[Record]) -> dict[str, Counter[str]]:
    """Return how many trials have which value of each recorded fact."""
    versions = [one.get("versions") or {} for one in recorded]
    data = [one.get("data") or {} for one in recorded]
    code = [one.get("code") or {} for one in recorded]
    words = {None: None, True: "yes", False: "no"}
    facts: dict[str, list[Any]] = {
        "commit": [one.get("commit") for one in recorded],
        "uncommitted changes": [words[one.get("dirty")] for one in recorded],
        CODE_FACTS[0]: [" + ".join(one.get("training", ())) or None for one in code],
        CODE_FACTS[1]: [one.get("measurement") or None for one in code],
        "kvlab": [one.get("kvlab") for one in recorded],
        "python": [one.get("python") for one in recorded],
    }
    for package in sorted({name for of_trial in versions for name in of_trial}):
        facts[package] = [one.get(package) for one in versions]
    facts |= {name: [one.get(name) for one in recorded] for name in ("device", "threads")}
    for part in ("identity", "digest", "tokenizer", "licence"):
        facts[f"data {part}"] = [one.get(part) for one in data]
    overlaps = [item for one in data for item in (one.get("overlap") or {}).items()]
    for length, share in sorted(overlaps, key=lambda item: int(item[0])):
        name = f"held-out tokens in {length}-grams of the training text"
        facts.setdefault(name, []).append(f"{share:.2%}")
    counted = {
        name: Counter(str(value) for value in values if value is not None)
        for name, values in facts.items()
    }
    return {name: values for name, values in counted.items() if values}
