"""Fingerprints: sha256 of canonical JSON of what a trial computes, never of where or when.

The training fingerprint names the weights. The trial fingerprint adds how they are served and
measured. Settings that cannot change the computation are left out, and different spellings of
one computation are made equal: K/V sharing enters as the owner map, the attention pattern as one
letter per layer, a tie as the buffers and their writers. The text enters as the digest of its
tokens: where it lies, how it is split into files and which settings selected it do not count.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvlab.data.requirements import list_window_requests
from kvlab.layout import KVLayout
from kvlab.spec.dtypes import MODEL_DTYPE
from kvlab.spec.experiment import Experiment

if TYPE_CHECKING:
    from kvlab.trial.initial_weights import InitialWeights

ID_LENGTH = 16
"""Hex digits of a fingerprint that make an id: 64 bits."""

TRAINING_VERSION = 2
"""Raise it when the same training spec computes something else than before."""

MEASUREMENT_VERSION = 1
"""Raise it when the same serving, evaluation or benchmark spec measures something else."""


def fingerprint(value: Any) -> str:
    """Return 64 hex digits of plain data, equal on every machine and Python version.

    Raises:
        ValueError, TypeError: a number is NaN or infinite, or a part is no plain data.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def training_identity(
    experiment: Experiment,
    data_identity: str,
    seed: int,
    initial_weights: "InitialWeights | None" = None,
) -> dict[str, Any]:
    """Return what the final weights depend on, as plain data.

    Freshly drawn weights follow from the seed; others enter by their contents.

    Args:
        data_identity: digest of the text's tokens, `kvlab.data.DatasetFacts.digest`.
    """
    facts: dict[str, Any] = {
        "version": TRAINING_VERSION,
        "model": experiment.model.computation(),
        "data": {**experiment.data.identity(), "digest": data_identity},
        "training": experiment.training.identity_of(experiment.model),
        "seed": seed,
    }
    if initial_weights is not None:
        facts["start"] = initial_weights.identity
    return facts


def trunk_fingerprint(experiment: Experiment, training: Mapping[str, Any]) -> str | None:
    """Return 64 hex digits that name the stable phase of a training under wsd.

    Trainings of several token budgets have it in common: the same recipe but for ``tokens``,
    ``decay_tokens`` and ``final_learning_rate``, which act from the decay on. ``warmup_tokens``
    must be equal, too; its default depends on ``tokens``.

    Args:
        training: Its `training_identity`.

    Returns:
        None if the training has no stable phase followed by a decay.
    """
    if not experiment.training.stable_steps:
        return None
    left_out = {"tokens", "decay_tokens", "final_learning_rate"}
    recipe = {key: value for key, value in training["training"].items() if key not in left_out}
    return fingerprint({**training, "training": recipe, "phase": "stable"})


def trial_identity(experiment: Experiment, training: str) -> dict[str, Any]:
    """Return what a result depends on; ``training`` is the training fingerprint."""
    evaluation = experiment.evaluation
    scored, items = evaluation.identity(), evaluation.hellaswag_items
    scored["hellaswag"] = "all" if items is None else items
    if evaluation.served:
        scored["served_tokens"] = evaluation.served_tokens or evaluation.loss_tokens
    else:
        del scored["served_tokens"]
    longest = max((length for *_, length in list_window_requests(experiment)), default=0)
    model = experiment.model
    seen = [(n.visible_tokens(model.block_size), n.visible_tokens(longest)) for n in model.layers]
    if any(model.block_size <= trained and measured < longest for trained, measured in seen):
        # which a training does not tell from no window
        scored["windows"] = [[layer.window, layer.sink_tokens] for layer in model.layers]
    if metrics := experiment.token_metrics:
        scored["token_metrics"] = sorted([one.name, file.digest] for one, file in metrics.items())
    return {
        "version": MEASUREMENT_VERSION,
        "training": training,
        "serving": _serving_identity(experiment),
        "evaluation": scored,
        "benchmark": experiment.benchmark.identity(),
    }


def _serving_identity(experiment: Experiment) -> dict[str, Any]:
    layout = KVLayout.of(experiment.model, experiment.serving)
    layout_fields = ("tie", "tie_rule", "kv_group", "kv_residual", "kv_rotate")
    facts = experiment.serving.identity_of(experiment.model)
    data = {k: v for k, v in facts.items() if k not in layout_fields}
    if layout.storage_dtype(MODEL_DTYPE) != MODEL_DTYPE:
        data["compared_with"] = MODEL_DTYPE  # a dtype of its own is measured against this one
    return {**data, **layout.identity()}
