"""Fixtures that tests of several packages use."""

from contextlib import nullcontext

import pytest

from tests.support.mlflow_template import copy_new_databases


@pytest.fixture(params=["kernels", "plain"])
def code_path(request):
    """Run the test with the CPU kernels, and again with plain PyTorch in their place."""
    from kvlab.model.kernels import use_plain_code

    with use_plain_code() if request.param == "plain" else nullcontext():
        yield request.param


@pytest.fixture(scope="session", autouse=True)
def mlflow_template(tmp_path_factory, request):
    """New MLflow databases are copies of one that all workers share; see `copy_new_databases`."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if hasattr(request.config, "workerinput") else folder
    with copy_new_databases(shared / "mlflow_template") as make_template:
        yield make_template
