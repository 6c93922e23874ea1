"""The shipped experiment with layers of gated linear attention, and the page's example."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

from kvlab.layout import KVLayout
from kvlab.spec import load_experiment

ROOT = Path(__file__).parents[3]
EXPERIMENT = ROOT / "experiments" / "hybrid.yaml"


def test_the_shipped_experiment_and_the_page_are_planned():
    experiment = load_experiment(EXPERIMENT)
    layout = KVLayout.of(experiment.model, experiment.serving)
    state, token = 4 * 16 * 16 * 4, 2 * 4 * 16 * 4
    for context in (1, 100, 10**6):
        assert layout.stored_bytes(1, context) == 3 * state + context * token
    assert "3 D slots) x (4 x 16 x 16 x 4 bytes of state)" in layout.formula(1, 8)
    page = (ROOT / "kvlab/extensions/linear_attention/README.md").read_text()
    own = re.search(r"`kinds: (\{D: .*?\}\})`", page).group(1)
    changes = {"model.kinds": yaml.safe_load(own), "model.attention_pattern": "DDDG"}
    model = load_experiment(EXPERIMENT, changes).model
    assert model.layers[0].n_kv_head == 1
    assert KVLayout.of(model).plans[0].stored_bytes(5, "float32") == 4 * 32 * 32


def test_it_is_planned_without_torch():
    program = (
        "import sys; from kvlab.spec import load_experiment; from kvlab.layout import KVLayout\n"
        "model = load_experiment(sys.argv[1]).model\n"
        "print(KVLayout.of(model).stored_bytes(1, 9), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(EXPERIMENT)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert shown.stdout.split() == ["16896", "False"]
