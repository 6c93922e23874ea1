"""What specs, data and models ask of the extension of published weights, by name."""

from typing import Any

from kvlab.errors import PretrainedError
from kvlab.own_extensions import explain_missing, find_member


def find_checkpoint_tool(name: str) -> Any:
    """Return a function of the extension that identifies, loads and saves published weights.

    Raises:
        PretrainedError: it is not there.
    """
    if missing := explain_missing("published weights"):
        raise PretrainedError(f"a checkpoint {missing}")
    return find_member("checkpoints", name)
