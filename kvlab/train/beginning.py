"""The contract of first weights that a training does not draw itself."""

from typing import Any, Protocol

from kvlab.model import GPT


class Beginning(Protocol):
    """First weights that come from elsewhere."""

    @property
    def identity(self) -> Any:
        """What they are, as plain data."""

    def apply(self, model: GPT) -> None:
        """Puts them into a model that has its own."""
