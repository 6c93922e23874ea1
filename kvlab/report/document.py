"""A report before it takes a form: its title and its sections."""

from dataclasses import dataclass

from kvlab.errors import UsageError
from kvlab.report.section import Figure, Section, Table
from kvlab.report.sections import QUALITY_SECTIONS, SECTIONS, explain_unknown_section
from kvlab.report.study import Study


@dataclass(frozen=True)
class Document:
    """``sections`` are in order, by their names in the table of sections."""

    title: str
    sections: dict[str, Section]

    @property
    def tables(self) -> list[Table]:
        contents = (c for section in self.sections.values() for c in section.contents)
        return [content for content in contents if isinstance(content, Table)]

    @property
    def figures(self) -> list[Figure]:
        contents = (c for section in self.sections.values() for c in section.contents)
        return [content for content in contents if isinstance(content, Figure)]

    @property
    def numbers(self) -> dict[tuple[str, str], str]:
        """Kind and name of each table and figure -> what it is called, such as ``Table 2``."""
        found = {("Table", one.name): f"Table {n}" for n, one in enumerate(self.tables, 1)}
        return found | {
            ("Figure", one.name): f"Figure {n}" for n, one in enumerate(self.figures, 1)
        }


def make_document(study: Study) -> Document:
    """Every section that was asked for and has something to say about this study.

    Unasked, those about quality are left out where no weights are trained.

    Raises:
        UsageError: a section was asked for that this version does not have.
    """
    for name in study.sections or ():
        if name not in SECTIONS:
            text = f"report.sections = {name} {explain_unknown_section(name)}"
            raise UsageError(f"{text}; or choose others with --sections")
    skipped = QUALITY_SECTIONS if study.untrained else frozenset()
    names = study.sections or [name for name in SECTIONS if name not in skipped]
    made = {name: SECTIONS[name](study) for name in names}
    return Document(study.name, {name: section for name, section in made.items() if section})
