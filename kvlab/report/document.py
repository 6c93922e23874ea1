"""A report before it takes a form: its title and its sections."""

from dataclasses import dataclass

from kvlab.report.section import Figure, Section, Table
from kvlab.report.sections import SECTIONS
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


def make_document(study: Study) -> Document:
    """Every section that has something to say about this study."""
    made = {name: make(study) for name, make in SECTIONS.items()}
    return Document(study.name, {name: section for name, section in made.items() if section})
