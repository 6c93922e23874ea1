"""A made record of a sweep whose rates were tuned."""

from tests.support.record_factory import TunedRecord

RECORD = TunedRecord()
