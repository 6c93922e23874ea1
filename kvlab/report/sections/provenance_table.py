"""Provenance: what it takes to get these numbers again."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.humanize import format_count
from kvlab.report.document import (
    Block,
    Cell,
    Code,
    Column,
    Content,
    Row,
    Section,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.study import Study

Facts = Mapping[str, Any]


def report_provenance(study: Study) -> Section:
    contents: list[Content] = [
        paragraph("Computed by ", Code(str(study.sweep.get("command") or "kvlab submit")), "."),
        paragraph(
            "This report is a pure function of the record; the same record gives the same bytes."
            " Make it again with ",
            Code(f"kvlab report {study.name}{_sections(study)}"),
            ".",
        ),
    ]
    recorded = [row.record["provenance"] for row in study.rows if row.record.get("provenance")]
    if recorded:
        facts = _facts(recorded)
        contents += _warnings(facts)
        contents.append(_table(facts))
    for title, key in (("The sweep", "yaml"), ("The base experiment", "experiment_yaml")):
        if study.sweep.get(key):
            contents.append(Block(title, str(study.sweep[key]), "yaml"))
    return Section("Provenance", tuple(contents))


def _sections(study: Study) -> str:
    """The option that asks for these sections, where the sweep itself asks for others."""
    asked = (study.sweep.get("report") or {}).get("sections")
    if study.sections is None or list(study.sections) == asked:
        return ""
    return f" --sections {','.join(study.sections)}"


def _facts(recorded: list[Facts]) -> dict[str, Counter[str]]:
    """Fact -> how many trials have which value."""
    found: dict[str, Counter[str]] = {}

    def count(name: str, places: Sequence[Facts], key: str) -> None:
        values = Counter(str(place[key]) for place in places if place.get(key) is not None)
        if values:
            found[name] = values

    versions = [facts.get("versions") or {} for facts in recorded]
    texts = [facts.get("data") or {} for facts in recorded]
    count("commit", recorded, "commit")
    count("uncommitted changes", [{"dirty": _yes_no(f.get("dirty"))} for f in recorded], "dirty")
    count("kvlab", recorded, "kvlab")
    count("python", recorded, "python")
    for package in sorted({name for known in versions for name in known}):
        count(package, versions, package)
    count("device", recorded, "device")
    count("threads", recorded, "threads")
    for part in ("identity", "digest", "tokenizer", "licence"):
        count(f"data {part}", texts, part)
    return found


def _yes_no(value: object) -> str | None:
    return None if value is None else ("yes" if value else "no")


def _warnings(facts: dict[str, Counter[str]]) -> list[Content]:
    mixed = [name for name, values in facts.items() if len(values) > 1]
    warnings: list[Content] = []
    if mixed:
        text = f" trials differ in {', '.join(mixed)}; a difference between cells may come from it."
        warnings.append(paragraph(Strong("Mixed record:"), text))
    if "yes" in facts.get("uncommitted changes", {}):
        text = " some trials ran code with uncommitted changes, so their commit does not say all."
        warnings.append(paragraph(Strong("Uncommitted code:"), text))
    return warnings


def _table(facts: dict[str, Counter[str]]) -> Table:
    rows = [
        Row((cell(name), Cell(value, value, code=True), cell(f"{count:,}", count)))
        for name, values in facts.items()
        for value, count in sorted(values.items())
    ]
    columns = (Column("what"), Column("value"), Column("trials", True))
    caption = (
        f"What ran, over {format_count(max(sum(v.values()) for v in facts.values()), 'trial')}."
    )
    return Table("provenance", caption, columns, tuple(rows))
