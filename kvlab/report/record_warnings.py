"""What the record says against comparing its trials: mixed code, texts or tokenizers, leaks."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlab.analysis.study import Study
from kvlab.report.document import Content, Span, Strong, paragraph

Record = Mapping[str, Any]

ACCEPTED_OVERLAP = 0.01


def list_confounds(study: Study) -> Iterator[tuple[Span, ...]]:
    """Yield what keeps losses of different cells from being compared."""
    data = {
        row.record["provenance"]["data"]["digest"]
        for row in study.done_rows
        if _has_data(row.record)
    }
    if len(data) > 1:
        yield (f"Confounded: the cells were trained on {len(data)} different texts.",)
    if len(study.tokenizers) > 1:
        yield (
            "Cells differ in tokenizer, so losses per token do not compare. The report compares"
            " bits per byte.",
        )


def _has_data(facts: object) -> bool:
    return isinstance(facts, dict) and bool((facts.get("provenance") or {}).get("data"))


def list_warnings(study: Study) -> list[Content]:
    """Say what limits all comparisons: mixed records, uncommitted code, text that leaked."""
    recorded = [row.record["provenance"] for row in study.rows if row.record.get("provenance")]
    return [*_warnings(count_values(recorded)), *_warn_of_overlap(recorded)]


def count_values(recorded: list[Record]) -> dict[str, Counter[str]]:
    """Return how many trials have which value of each recorded fact."""
    counts: dict[str, Counter[str]] = {}

    def count(name: str, records: Sequence[Record], key: str) -> None:
        values = Counter(str(one[key]) for one in records if one.get(key) is not None)
        if values:
            counts[name] = values

    versions = [counts.get("versions") or {} for counts in recorded]
    data = [counts.get("data") or {} for counts in recorded]
    count("commit", recorded, "commit")
    count("uncommitted changes", [{"dirty": _yes_no(f.get("dirty"))} for f in recorded], "dirty")
    count("kvlab", recorded, "kvlab")
    count("python", recorded, "python")
    for package in sorted({name for of_trial in versions for name in of_trial}):
        count(package, versions, package)
    count("device", recorded, "device")
    count("threads", recorded, "threads")
    for part in ("identity", "digest", "tokenizer", "licence"):
        count(f"data {part}", data, part)
    for length in sorted({n for one in data for n in one.get("overlap") or {}}, key=int):
        shares = [{length: f"{one['overlap'][length]:.2%}"} for one in data if one.get("overlap")]
        count(f"held-out tokens in {length}-grams of the training text", shares, length)
    return counts


def _yes_no(value: object) -> str | None:
    return None if value is None else ("yes" if value else "no")


def _warnings(counts: dict[str, Counter[str]]) -> list[Content]:
    mixed = [name for name, values in counts.items() if len(values) > 1]
    warnings: list[Content] = []
    if mixed:
        text = f" trials differ in {', '.join(mixed)}, which may cause differences between cells."
        warnings.append(paragraph(Strong("Mixed record:"), text))
    if "yes" in counts.get("uncommitted changes", {}):
        text = " some trials ran code with uncommitted changes, which their commit does not name."
        warnings.append(paragraph(Strong("Uncommitted code:"), text))
    return warnings


def _warn_of_overlap(recorded: list[Record]) -> list[Content]:
    """Warn where passages of the held-out text are in the training text."""
    overlaps = [(record.get("data") or {}).get("overlap") or {} for record in recorded]
    worst = max((shares[max(shares, key=int)] for shares in overlaps if shares), default=0.0)
    if worst <= ACCEPTED_OVERLAP:
        return []
    text = f" {worst:.1%} of the held-out tokens are in long passages of the training text, so"
    return [paragraph(Strong("Leaked text:"), f"{text} losses measure memory in part.")]
