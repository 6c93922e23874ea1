"""Results to a report: tidy rows, statistics, sections, then Markdown and HTML."""

from kvlab.report.report_files import answer_text, write_report, write_study_report

__all__ = ["answer_text", "write_report", "write_study_report"]
