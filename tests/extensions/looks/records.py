"""The record of the section of looks: the full one."""

from tests.report.full_record import RECORD

__all__ = ["RECORD"]
