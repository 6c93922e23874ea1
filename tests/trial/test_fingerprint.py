"""What enters a fingerprint, and what must not."""

import json
import math
from pkgutil import resolve_name

import pytest
from pydantic import BaseModel

from kvlab.own_extensions import load_parts
from kvlab.spec import Experiment
from kvlab.spec.extension_files import trust
from kvlab.trial import Trial
from kvlab.trial.fingerprint import fingerprint, training_identity, trial_identity
from kvlab.trial.initial_weights import CheckpointWeights

BASE = {
    "name": "base",
    "model": {
        "vocab_size": 300, "block_size": 16, "n_layer": 4, "n_head": 4, "n_kv_head": 2,
        "n_embd": 32, "position": "rope", "window": 8, "attention_pattern": "GL",
    },
    "data": {"source": "files", "paths": ["a.txt"], "tokenizer": "bytes"},
    "training": {"tokens": 6400, "batch_tokens": 64},
    "serving": {"tie": "adjacent:2"},
    "evaluation": {"loss_tokens": 1000, "hellaswag": 10, "served_tokens": 500},
    "benchmark": {"prompt_tokens": 4, "new_tokens": 4},
}  # fmt: skip

MINE = "from kvlab.extend import Extension\nextension = Extension()\n"
trust(MINE)

# Another value for every field of an experiment. A field that is not here fails a test.
OTHER_BY_SECTION = {
    "": {"name": "other", "description": "other", "extensions": {"mine.py": MINE}},
    "model": {
        "vocab_size": 301, "block_size": 32, "n_layer": 8, "n_head": 2, "n_kv_head": 1,
        "n_embd": 64, "head_dim": 16, "ffn_dim": 100, "position": "none", "rope_theta": 500.0,
        "rotary_share": 0.5, "norm": "rmsnorm", "rope_scaling": {"by": "linear", "factor": 2.0},
        "norm_placement": "sandwich", "qk_norm": True, "attention_scale": 0.5,
        "embedding_scale": 2.0, "norm_eps": 1e-6, "mlp": "swiglu", "bias": False,
        "tie_embeddings": False, "window": 4, "attention_pattern": "LG", "sink": "learned",
        "sink_tokens": 2, "local": {"n_kv_head": 1}, "global": {"rope_theta": 500.0},
        "kinds": {"N": {"position": "none"}}, "kv_sharing": "adjacent:2",
    },
    "data": {
        "source": "docstrings", "tokenizer": "gpt2:260", "paths": ["b.txt"], "licence": "CC0",
        "max_bytes": 10_000, "max_tokens": 10_000,
        "validation_fraction": 0.1, "mask_documents": True,
    },
    "training": {
        "tokens": 12_800, "batch_tokens": 128, "learning_rate": 1e-3, "final_learning_rate": 0.0,
        "schedule": "wsd", "decay_tokens": 640, "warmup_tokens": 0, "weight_decay": 0.0,
        "beta1": 0.8, "beta2": 0.99, "adam_eps": 1e-6, "clip": 2.0, "spike": 2.0,
        "precision": "bfloat16", "kv_dtype": "int8", "kv_group": 4,
        "residual": "bfloat16", "compile": True, "evaluate_every": 7,
        "evaluate_tokens": 77, "checkpoint_every": 7,
        "init_from": "somebody/model",
    },
    "serving": {
        "kv_dtype": "int8", "kv_group": 4, "compile": True, "tie": "none", "tie_rule": "owner",
    },
    "evaluation": {
        "loss_tokens": 2000, "loss_bytes": 2000, "hellaswag": "all", "text_parts": 3,
        "served": False, "served_tokens": 600, "positions": True, "precision": "float32",
    },
    "benchmark": {
        "prompt_tokens": 8, "new_tokens": 8, "batch_sizes": [1, 2], "repeats": 5,
        "context_lengths": [8], "roofline": True, "seconds": 60.0, "parts": ["task"],
        "retime": "never",
    },
    "resources": {
        "cpus": 2.0, "gpus": 1.0, "workers": 2, "microbatch_tokens": 32, "accelerator_type": "H100",
    },
}  # fmt: skip
OTHER = {
    f"{section}.{name}".removeprefix("."): value
    for section, values in OTHER_BY_SECTION.items()
    for name, value in values.items()
}
NEVER = {
    "name", "description", "benchmark.retime",
    "extensions",  # what is used of a file counts, see tests of extension files
    *(f"training.{name}" for name in ("checkpoint_every", "init_from")),
    # these select the text, whose digest counts
    *(f"data.{name}" for name in ("source", "subset", "paths", "max_bytes", "max_tokens")),
    "data.validation_fraction", "data.licence",
}  # fmt: skip
"""What `training.init_from` stands for counts, see the test of starts below."""

WITH_IT = {
    "data.source": {"data.paths": []},
    "training.decay_tokens": {"training.schedule": "wsd"},
    "model.kinds": {"model.attention_pattern": "GLLN"},
}
"""What else an experiment needs that has this value."""

IN_BOTH = {
    "benchmark.parts": {"model.block_size": 512, "training.batch_tokens": 512},
    "resources.accelerator_type": {"resources.gpus": 1.0},
    "training.residual": {"training.precision": "bfloat16"},
    "evaluation.loss_bytes": {"evaluation.loss_tokens": 65_536, "evaluation.served_tokens": None},
    "serving.kv_group": {"serving.kv_dtype": "int8"},
    "training.kv_group": {"training.kv_dtype": "int8"},
}
"""What the experiment has, too, that it is compared with."""


def experiment(patch=None, base=BASE):
    data = json.loads(json.dumps(base))
    for key, value in (patch or {}).items():
        section, _, field = key.rpartition(".")
        (data.setdefault(section, {}) if section else data)[field] = value
    return Experiment.model_validate(data)


def both(one, data="text", seed=0):
    training = fingerprint(training_identity(one, data, seed))
    return training, fingerprint(trial_identity(one, training))


def fields(model, location=""):
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, f"{location}{name}.")
        else:
            yield location + (field.alias or name)


def check_field(key, patch, needed):
    """Compare the fingerprints of experiments with and without a patch, which sets ``key``."""
    section, _, name = key.rpartition(".")
    plain, changed = experiment(needed), experiment(needed | patch)
    name = f"{name}_" if name == "global" else name
    assert getattr(getattr(changed, section) if section else changed, name) != getattr(
        getattr(plain, section) if section else plain, name
    )
    same_training, same_trial = (a == b for a, b in zip(both(changed), both(plain), strict=True))
    if key in NEVER or section == "resources":
        assert (same_training, same_trial) == (True, True)
    elif section in ("serving", "evaluation", "benchmark"):
        assert (same_training, same_trial) == (True, False)
    else:
        assert (same_training, same_trial) == (False, False)


@pytest.mark.parametrize("key", OTHER)
def test_each_field_enters_the_fingerprint_it_belongs_to(key):
    check_field(key, {key: OTHER[key], **WITH_IT.get(key, {})}, IN_BOTH.get(key, {}))


def list_added_fields():
    """Return the fields of extensions, which `tests/extensions/test_fingerprint.py` tries."""
    added = [one for parts in load_parts().values() for one in parts.fields.items()]
    names = {f"{section}.{name}" for section, of in added for name in resolve_name(of).model_fields}
    return names & set(fields(Experiment))


def test_every_field_is_tried_and_the_text_and_the_seed_enter_the_training():
    # options of a source are of a user's file, whose tests try them
    not_here = {
        "data.options", "model.kv", "serving.kv_rotate", "training.optimizer", *list_added_fields(),
    }  # fmt: skip
    assert set(OTHER) == set(fields(Experiment)) - not_here
    here = both(experiment())
    assert not set(here) & set(both(experiment(), data="other text"))
    assert not set(here) & set(both(experiment(), seed=1))


LINEAR = {"rope_scaling": {"by": "linear", "factor": 2.0}}
ROPE_SCALING = {f"model.{key}": value for key, value in LINEAR.items()}


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ({}, {"model.attention_pattern": "GLGL"}),
        ({}, {"model.head_dim": 8, "model.ffn_dim": 128}),
        ({}, {"training.final_learning_rate": 6e-5, "training.warmup_tokens": 256}),
        ({}, {"training.tokens": 6.4e3, "training.clip": 1}),
        ({}, {"serving.tie": [[0, 2], [1, 3]]}),
        ({"serving.kv_dtype": "int8"}, {"serving.kv_dtype": "int8", "serving.kv_group": 8}),
        ({"serving.kv_dtype": "int8"}, {"serving.kv_dtype": {"k": "int8", "v": "int8"}}),
        ({"training.kv_dtype": "int8"}, {"training.kv_dtype": "int8", "training.kv_group": 8}),
        ({}, {"training.kv_dtype": "float32"}),
        ({}, {"serving.tie": [0, 1, 0, 1]}),
        ({"model.kv_sharing": "adjacent:2"}, {"model.kv_sharing": [[0, 2], [1, 3]]}),
        ({"model.kv_sharing": "adjacent:2"}, {"model.kv_sharing": [0, 1, 0, 1]}),
        ({"serving.tie": "none"}, {"serving.tie": "none", "serving.tie_rule": "owner"}),
        ({"model.position": "none"}, {"model.position": "none", "model.rope_theta": 7.0}),
        ({"model.position": "none"}, {"model.rotary_share": 0}),
        ({"model.position": "none"}, {"model.position": "none", **ROPE_SCALING}),
        (ROPE_SCALING, {"model.global": LINEAR, "model.local": LINEAR}),
        ({"model.position": "none"}, {"model.global": {"position": "none"}, "model.local": {"rotary_share": 0}}),
        ({}, {"model.window": None, "model.local": {"window": 8}}),
        ({}, {"model.window": None, "model.attention_pattern": "GW", "model.kinds": {"W": {"window": 8}}}),
        ({}, {"model.n_kv_head": 4, "model.local": {"n_kv_head": 2}, "model.global": {"n_kv_head": 2}}),
        ({}, {"model.global": {"window": 16}}),
        ({"model.window": 12, "model.sink_tokens": 4}, {"model.window": 16}),
        ({"evaluation.hellaswag": 0}, {"evaluation.hellaswag": "none"}),
        ({}, {"benchmark.parts": [], "benchmark.seconds": 0.5}),
        ({"evaluation.served_tokens": 1000}, {"evaluation.served_tokens": None}),
        ({"evaluation.served": False, "evaluation.served_tokens": 9}, {"evaluation.served": False}),
    ],
)  # fmt: skip
def test_spellings_of_one_computation_are_equal(one, same):
    assert both(experiment(one)) == both(experiment(same))


BEYOND = {"evaluation.positions": True, "model.window": None, "model.attention_pattern": "GW"}


@pytest.mark.parametrize(
    ("one", "other", "same_training"),
    [
        (ROPE_SCALING, {"model.global": LINEAR}, False),
        (ROPE_SCALING, {"model.local": LINEAR}, False),
        ({"model.global": LINEAR}, {"model.local": LINEAR}, False),
        # a window that holds the block, where windows of twice the block are scored
        (
            {**BEYOND, "model.kinds": {"W": {"window": 16}}},
            {**BEYOND, "model.kinds": {"W": {"window": 32}}},
            True,
        ),
        (
            {**BEYOND, "model.kinds": {"W": {"window": 16}}},
            {**BEYOND, "model.kinds": {"W": {"window": 12}}, "model.sink_tokens": 4},
            True,
        ),
    ],
)
def test_what_computes_otherwise_is_another_trial(one, other, same_training):
    (training, trial), (other_training, other_trial) = (
        both(experiment(one)),
        both(experiment(other)),
    )
    assert trial != other_trial
    assert (training == other_training) == same_training


def test_plain_data_has_one_fingerprint_whatever_the_order_of_its_keys():
    # sha256 of {"a":[1,2.5,null,true],"b":"\u00e9"}: what the record was made with stays valid
    assert (
        fingerprint({"b": "é", "a": (1, 2.5, None, True)})
        == "c66fca9242300f12718a1c583fc29f33790cbd7c712332cbc99734fd757a0385"
    )
    assert fingerprint(1) != fingerprint(True) != fingerprint(1.0)
    with pytest.raises(ValueError, match="[Oo]ut of range"):
        fingerprint({"a": math.nan})


def test_what_a_training_starts_from_enters_both_fingerprints_by_its_contents():
    fresh = both(experiment())

    def starting(identity, name="a", location="b"):
        start = CheckpointWeights(name, location, identity)
        return Trial.of(experiment(), "text", 0, start)

    one = starting({"model.safetensors": "1" * 64})
    assert one.training_id != fresh[0][:16]
    assert one.id != fresh[1][:16]
    same = starting({"model.safetensors": "1" * 64}, "c", "d")
    assert (same.training_id, same.id) == (one.training_id, one.id)
    assert starting({"model.safetensors": "2" * 64}).training_id != one.training_id
