"""The section of recall, word for word: reports/recall has no documents of several sizes."""

from pathlib import Path

from kvlab.report.html_page import render_html
from kvlab.report.report_files import make_document
from kvlab.store.metrics import METRICS
from tests.evaluate.test_token_metrics import FILE
from tests.extensions.recall.records import RECORD
from tests.report.reading import load, markdown
from tests.support.golden import check_golden


def test_the_section_is_the_golden_one(tmp_path):
    study = load(RECORD, tmp_path, "recall")
    check_golden(Path(__file__).with_name("report.txt"), markdown(study))
    assert render_html(make_document(study)).count("4,000 answers a trial") > 4


def test_a_users_metric_does_not_take_the_name_of_a_group():
    METRICS.offer([FILE.replace('"rank"\n', '"recall_16_back"\n')])
    assert METRICS["recall_16_back"].title != "rank of the right token"
