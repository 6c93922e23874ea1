"""The contract of a published architecture: Hugging Face's names and shapes against ours."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvlab.errors import PretrainedError
from kvlab.spec.model import ModelConfig


@dataclass(frozen=True)
class Weight:
    """One of our parameters as theirs: put below each other along the output dimension.

    Attributes:
        ours: our parameter's name.
        theirs: their tensors' names, in the order of our rows.
        rows: how many of our rows each of theirs holds; one entry a name.
        turned: theirs stand as (inputs, outputs), as GPT-2's Conv1D keeps them.
    """

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    turned: bool = False


class Architecture(ABC):
    """One value of ``model_type`` in a Hugging Face ``config.json``."""

    prefix: str
    """What their names start with in a language model's checkpoint; a bare one leaves it out."""

    ignored: tuple[str, ...] = ()
    """Endings of tensors in checkpoints that are no weights (masks, frequencies)."""

    @abstractmethod
    def read_config(self, theirs: dict[str, Any]) -> dict[str, Any]:
        """Our model's fields.

        Raises:
            PretrainedError: the checkpoint uses something that our model does not have.
        """

    @abstractmethod
    def write_config(self, ours: ModelConfig) -> dict[str, Any]:
        """Their configuration of a model that `misfits` does not object to."""

    @abstractmethod
    def misfits(self, ours: ModelConfig) -> list[str]:
        """Why our model cannot be written as this architecture; empty if it can."""

    @abstractmethod
    def weights(self, ours: ModelConfig) -> Iterator[Weight]:
        """Every parameter of our model."""


def refuse_values(theirs: dict[str, Any], wanted: dict[str, tuple[Any, ...]]) -> None:
    """Raises PretrainedError unless every key has one of the values that we can compute."""
    for key, values in wanted.items():
        value = theirs.get(key, values[0])
        if value not in values:
            usable = " or ".join(map(str, values))
            raise PretrainedError(
                f"config.json: {key} = {value} is not supported; only {usable} is"
            )
