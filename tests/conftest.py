"""Fixtures that tests of several packages use."""

import os
import sys
import tempfile
from contextlib import nullcontext
from getpass import getuser

import pytest
from hypothesis import settings

from kvlab.data import dataset_preparation
from kvlab.sweep.planning import budget
from tests.support.mlflow_template import copy_new_databases
from tests.support.tiny_sweep import OUTER_VARIABLES

settings.register_profile("any machine", deadline=None)  # a busy one is slow now and then
settings.load_profile("any machine")


@pytest.fixture(params=["kernels", "plain"])
def code_path(request):
    """Run the test with the CPU kernels, and again with plain PyTorch in their place."""
    from kvlab.model.kernels.cpu_kernel import use_plain_code

    with use_plain_code() if request.param == "plain" else nullcontext():
        yield request.param


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    """Commands run as if nothing was set in the environment, and torch with one thread.

    An earlier test's command may have set more, and several on a busy machine wait for each other.
    """
    for name in OUTER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def compiled_code():
    """Keep what `torch.compile` makes where torch does, whichever data folder a test has."""
    own = os.path.join(tempfile.gettempdir(), f"torchinductor_{getuser()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", own)


@pytest.fixture(scope="session", autouse=True)
def mlflow_template(tmp_path_factory, request):
    """New MLflow databases are copies of one that all workers share; see `copy_new_databases`."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if hasattr(request.config, "workerinput") else folder
    with copy_new_databases(shared / "mlflow_template") as make_template:
        yield make_template


SPEED = {"flops_per_second": 8e9, "is_scaled": False}


@pytest.fixture(scope="session", autouse=True)
def _known_machine_speed(tmp_path_factory):
    """Plans take the machine's speed as known, and not that of this one: to measure it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.getbasetemp() / "no rates are remembered"
        patch.setattr(budget, "get_data_dir", lambda: folder)
        patch.setattr(budget, "_measure", lambda *_: dict(SPEED))
        patch.setattr(budget, "write_json", lambda _path, _rates: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_tokenizing_process():
    """Text is tokenized in the test's process where it does not say in how many others.

    To start one takes a second, and the text of a test a hundredth.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_preparation, "cpu_count", lambda: 1)
        yield
