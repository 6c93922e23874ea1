"""`evaluation.lm_eval`: names, limits, files of one's own, and what is refused where."""

import pytest

from kvlab.errors import SpecError
from kvlab.extensions.lm_eval import config as module
from kvlab.spec import load_sweep
from kvlab.spec.evaluation_config import EvaluationConfig
from kvlab.trial import Trial

TASK = "task: letters\ndataset_path: json\n"


def write_sweep(folder, tasks):
    """A sweep of two cells whose base experiment evaluates on ``tasks``, on line 3."""
    (folder / "base.yaml").write_text(
        f"name: base\nevaluation:\n  lm_eval: {tasks}\nmodel: {{n_layer: 2, n_head: 2, n_embd: 8}}\n"
        "data: {tokenizer: bytes}\ntraining: {tokens: 0}\n"
    )
    path = folder / "made.yaml"
    path.write_text(
        "question: What?\nexperiment: base.yaml\n"
        "factors: {heads: {mha: {}, mqa: {model.n_kv_head: 1}}}\nseeds: [0, 1]\n"
    )
    return path


@pytest.fixture
def definition(tmp_path):
    """Write the file of a task; return how a spec names it."""
    (tmp_path / "letters.yaml").write_text(TASK)
    (tmp_path / "latin.yaml").write_bytes(b"# \xfc\n" + TASK.encode())
    return "[{task: letters, definition: letters.yaml, limit: 5}]"


@pytest.mark.parametrize(
    ("tasks", "column", "message"),
    [
        ("[arc_easy, arc_esy]", 23, "name its tasks); did you mean arc_easy or"),
        ("[{task: a, definition: no.yaml}]", 13, "no.yaml, which is not a file"),
        ("[{task: other, definition: letters.yaml}]", 13, "it needs the line task: other"),
        ("[{task: letters, definition: latin.yaml}]", 13, "no text in UTF-8; save it as such"),
    ],
)
@pytest.mark.usefixtures("definition")
def test_an_unknown_task_is_refused_where_it_is_written(tmp_path, tasks, column, message):
    pytest.importorskip("lm_eval")
    with pytest.raises(SpecError) as error:
        load_sweep(write_sweep(tmp_path, tasks))
    assert f"base.yaml:3:{column}: evaluation.lm_eval" in str(error.value)
    assert message in str(error.value)


def test_without_lm_eval_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda _name: None)
    with pytest.raises(SpecError, match=r"base.yaml:3:13: .*pip install 'kvlab\[lm-eval\]'"):
        load_sweep(write_sweep(tmp_path, "[piqa]"))


def test_a_definition_is_found_beside_the_sweep_and_counts_by_its_contents(tmp_path, definition):
    pytest.importorskip("lm_eval")
    path = write_sweep(tmp_path, definition)

    def identify():
        return Trial.of(load_sweep(path).cells()[0].experiment, "text", 0).id

    first = identify()
    assert identify() == first
    (tmp_path / "letters.yaml").write_text(TASK + "num_fewshot: 5\n")
    assert identify() != first
    assert "lm_eval" not in EvaluationConfig().identity()
