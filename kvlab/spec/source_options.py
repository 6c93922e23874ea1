"""What a source of text that makes its own tokens says about them."""

from abc import abstractmethod

from kvlab.spec.spec_model import SpecModel


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
