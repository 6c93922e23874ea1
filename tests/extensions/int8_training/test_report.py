"""The section of quantized training, word for word."""

from pathlib import Path

from tests.extensions.int8_training.records import RECORD
from tests.report.reading import load, markdown
from tests.support.golden import check_golden


def test_the_section_is_the_golden_one(tmp_path):
    said = markdown(load(RECORD, tmp_path, "quantized-training"))
    check_golden(Path(__file__).with_name("report.txt"), said)
