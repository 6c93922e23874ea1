"""A made record of trials of several sizes."""

from tests.support.record_factory import SizedRecord

RECORD = SizedRecord()
