"""`resources`: the number of workers, and requests that cannot share a step."""

import pytest

from kvlab.errors import SpecError
from kvlab.spec import load_experiment

TEXT = """\
name: e
model: {{vocab_size: 258, block_size: 16, n_layer: 1, n_head: 1, n_embd: 8}}
data: {{tokenizer: bytes}}
benchmark: {{prompt_tokens: 4, new_tokens: 4}}
training: {{tokens: 1920, batch_tokens: 192}}
resources: {{{resources}}}
"""


def load(folder, resources):
    path = folder / "e.yaml"
    path.write_text(TEXT.format(resources=resources))
    return load_experiment(path)


@pytest.mark.parametrize(
    ("resources", "workers"),
    [
        ("cpus: 2", 1),
        ("gpus: 0.5", 1),
        ("gpus: 4", 4),
        ("workers: 3", 3),
        ("gpus: 2, workers: 2", 2),
    ],
)
def test_workers_default_to_one_per_whole_gpu(tmp_path, resources, workers):
    assert load(tmp_path, resources).resources.training_workers == workers


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ("gpus: 4, workers: 2", "resources.workers = 2 is not the number of GPUs, 4"),
        (
            "workers: 5",
            "cannot divide batch_tokens = 192 into equal numbers of rows of block_size = 16",
        ),
        ("gpus: 8", "resources.gpus = 8 cannot divide batch_tokens = 192"),
        (
            "workers: 3, microbatch_tokens: 48",
            "must be a multiple of block_size = 16 and divide batch_tokens / workers = 64",
        ),
    ],
)
def test_workers_that_cannot_share_a_step_are_refused(tmp_path, resources, message):
    with pytest.raises(SpecError) as refused:
        load(tmp_path, resources)
    assert message in str(refused.value)
