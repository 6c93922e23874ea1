"""The section of quantized training, word for word."""

import os
from pathlib import Path

from tests.extensions.int8_training.records import RECORD
from tests.report.reading import load, markdown


def test_the_section_is_the_golden_one(tmp_path):
    path = Path(__file__).with_name("report.txt")
    said = markdown(load(RECORD, tmp_path, "quantized-training"))
    if os.environ.get("KVLAB_REWRITE_GOLDEN"):
        path.write_text(said, encoding="utf-8")
    assert said == path.read_text(encoding="utf-8")
