"""The formula against the storages, for every layout that a shipped sweep asks for."""

from pathlib import Path

import pytest
import torch

from kvlab.cache import KVCache
from kvlab.layout import KVLayout
from kvlab.spec import load_sweep

SWEEPS = sorted((Path(__file__).parents[2] / "sweeps").glob("*.yaml"))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_formula_and_storages_agree_to_the_byte(path):
    sweep = load_sweep(path)
    layouts = {}
    for cell in sweep.cells():
        experiment = cell.experiment
        layout = KVLayout.of(experiment.model, experiment.serving)
        layouts[layout, experiment.model.block_size] = None
    assert layouts
    for layout, block in layouts:
        cache = KVCache(layout, 1, block, torch.float32, torch.device("cpu"))
        assert cache.nbytes == layout.stored_bytes(1, block, "float32")
