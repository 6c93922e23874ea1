"""Weights as logged models: once for every training, linked to all of its trials."""

import shutil

from kvlab.cli.main import main
from tests.support.mlflow_contents import store_client, store_runs
from tests.support.record_factory import Record

RECORD = Record(factors={"sharing": ("none", "tied")}, seeds=(0,))
"""Two trials of one training."""


def test_models_are_logged_where_asked(tmp_path, mlflow_template, capsys):
    store = RECORD.write(tmp_path / "runs")
    shutil.copyfile(mlflow_template(), store.path / "mlflow.db")
    training = RECORD.training({"sharing": "none"}, 0)
    folder = store.training_directory(training)
    (folder / "final").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "final" / "model.safetensors").write_bytes(b"weights")
    client = store_client(store.path)

    def models():
        experiment = client.get_experiment_by_name("made").experiment_id
        return client.search_logged_models([experiment])

    sync = ["sync", "made", "--store", str(store.path), "--no-report"]
    assert main(sync) == 0
    assert models() == [], "nobody asked"
    assert main([*sync, "--models"]) == 0
    assert capsys.readouterr().out.endswith("0 written, 2 unchanged, 0 deleted, 1 model logged\n")
    [model] = models()
    assert (model.name, str(model.status)) == ("baseline seed 0", "READY")
    assert model.tags["kvlab.training"] == training
    assert {metric.key for metric in model.metrics} >= {"quality/loss", "quality/loss_served"}
    files = {file.path for file in client.list_logged_model_artifacts(model.model_id)}
    assert files == {"config.json", "model.safetensors"}
    outputs = {
        run.info.run_name: [output.model_id for output in run.outputs.model_outputs]
        for run in store_runs(store.path)
        if run.info.run_name != "made"
    }
    assert outputs == {"baseline seed 0": [model.model_id], "tied seed 0": [model.model_id]}
    assert main([*sync, "--models"]) == 0
    assert "0 models logged" in capsys.readouterr().out
    client.delete_run(model.source_run_id)
    assert main([*sync, "--models"]) == 0
    [again] = models()
    assert again.model_id != model.model_id, "its run was made anew"
