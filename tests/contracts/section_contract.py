"""The contract of report sections: what every renderer relies on, whatever the section."""

import re

from kvlab.report.document import Document, Figure, Table
from kvlab.report.html_page import render_html
from kvlab.report.markdown import render_markdown
from kvlab.report.sections import SECTIONS
from kvlab.report.table_export import table_to_csv, table_to_latex


class ReportSectionContract:
    """Holds for one entry of a table of sections.

    ``table`` is the table, by default that of designs.

    Give the fixtures ``name``; ``study``, which has everything that the section reports; and
    ``empty_study``, none of whose trials has ended.
    """

    table = SECTIONS

    def test_it_reports_what_the_study_has_in_every_format(self, name, study):
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", name), "an id of html"
        section = self.table[name].make(study)
        assert section.title
        assert section.contents
        assert self.table[name].make(study) == section, "it depends on the study alone"
        document = Document("made", {name: section})
        title = section.title
        head = f"<summary>{title}</summary>" if section.is_appendix else f"## {title}\n"
        assert head in render_markdown(document)
        assert f'<section id="{name}"' in render_html(document)

    def test_its_tables_are_rectangular_and_its_figures_described(self, name, study):
        contents = list(self.table[name].make(study).iter_contents())
        tables = [content for content in contents if isinstance(content, Table)]
        assert len({table.name for table in tables}) == len(tables)
        for table in tables:
            assert table.caption
            assert table.rows
            assert {len(row.cells) for row in table.rows} == {len(table.columns)}
            assert len(table_to_csv(table).splitlines()) == 1 + len(table.rows)
            assert f"\\label{{tab:{table.name}}}" in table_to_latex(table)
        for content in contents:
            if isinstance(content, Figure):
                assert content.caption in content.alt or len(content.alt) > len(content.caption)
                assert any(layer.points for layer in content.plot.layers)

    def test_a_study_without_results_is_no_error(self, name, empty_study):
        section = self.table[name].make(empty_study)
        assert section is None or section.contents
