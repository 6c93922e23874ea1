"""The section on quantized training: pairs, ratios also below one, kernels and padding."""

from kvlab.analysis.study import Study
from kvlab.report.document import Document
from kvlab.report.markdown import render_markdown
from kvlab.report.paper import write_methods
from kvlab.report.sections.quantized_training import report_quantized_training
from tests.support.record_factory import QuantizedTrainingRecord, Record


def test_each_cell_is_compared_with_the_same_recipe_in_float(tmp_path):
    def status(levels, seed):
        return "failed" if levels == {"mlp": "swiglu", "int8": "none"} and seed == 2 else "done"

    study = Study.load(QuantizedTrainingRecord(status=status).write(tmp_path), "made")
    section = report_quantized_training(study)
    table = section.contents[1]
    names = [column.title for column in table.columns]
    rows = [dict(zip(names, (c.text for c in row.cells), strict=True)) for row in table.rows]
    shown = [
        (row["change"], row["of float (speed)"], row["of float (peak memory)"], row["pairs"])
        for row in rows
    ]
    empty = rows[0]["change"]
    assert shown[0] == shown[2] == (empty,) * 4, "float cells stand beside"
    assert shown[1] == ("+0.0200 \N{PLUS-MINUS SIGN} 0.0000", "1.50\N{MULTIPLICATION SIGN}",
                        "0.800\N{MULTIPLICATION SIGN}", "3")  # fmt: skip
    assert shown[3][1:] == ("0.750\N{MULTIPLICATION SIGN}", "0.800\N{MULTIPLICATION SIGN}", "2")
    assert rows[1]["int8 products"] == "output, grad_weight"
    assert (rows[0]["kernel"], rows[1]["kernel"]) == (empty, "cublas")
    text = render_markdown(Document("made", {"quantized-training": section}))
    assert "output of blocks.0.mlp.up: 64 \N{MULTIPLICATION SIGN} 20" in text


def test_a_paper_names_the_products_and_cites_their_scheme(tmp_path):
    study = Study.load(QuantizedTrainingRecord().write(tmp_path), "made")
    text = write_methods(study)
    assert "in int8, with a dynamic scale for each row and column" in text
    assert r"output, grad\_weight" in text
    assert "wortsman2023stable" in text


def test_a_study_without_quantized_training_has_no_such_section(tmp_path):
    assert report_quantized_training(Study.load(Record().write(tmp_path), "made")) is None
