"""What the spec knows of a source of text, and what one that makes its own tokens says of them."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from kvlab.spec.spec_model import SpecModel


@dataclass(frozen=True)
class SourceEntry:
    """One text source, as the spec knows it.

    Attributes:
        factory: the `kvlab.data.sources.TextSource` class, as ``module:class``. It is named,
            not imported: specs do not import what reads text.
        reads_paths: whether it reads `data.paths`, whose licence the user states.
        needs_subset: whether it reads `data.subset`.
        options: the key of `data` that holds its `SourceOptions`, if it makes its own tokens.
    """

    factory: str
    arguments: tuple[Any, ...] = ()
    reads_paths: bool = False
    needs_subset: bool = False
    options: str | None = None


class SourceOptions(SpecModel):
    """Options of a source whose documents are symbols, and all of one length.

    A symbol is one token of the tokenizer ``symbols:N``. Its id alone says whether it is a target,
    so no mask is stored: training and scoring find the targets among the tokens.
    """

    @property
    @abstractmethod
    def symbols(self) -> int:
        """The number of different symbols, without the end of text."""

    @property
    @abstractmethod
    def target_ids(self) -> range:
        """The ids of the tokens that are targets; all others are context alone."""

    @property
    @abstractmethod
    def document_tokens(self) -> int:
        """Tokens of every document, with the end of text before it."""
