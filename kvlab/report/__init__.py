"""Results to a report: tidy rows, statistics, sections, then Markdown and HTML."""

from kvlab.report.report_files import write_report

__all__ = ["write_report"]
