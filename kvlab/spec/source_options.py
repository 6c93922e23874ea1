"""What the spec knows of a source of text, and what one that makes its own tokens says of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvlab.spec.members import Member, is_count
from kvlab.spec.spec_model import SpecModel

if TYPE_CHECKING:
    from kvlab.spec.data_config import DataConfig


class TextPart(NamedTuple):
    """What a text has of one source. Most texts are one part.

    Attributes:
        data: the `kvlab.spec.DataConfig` of this source alone.
        weight: its share of the tokens that are read is its weight over the sum of all weights.
        first_id: the id in the text of what is id 0 of its own tokenizer.
    """

    data: Any = None
    weight: int = 1
    first_id: int = 0

    @property
    def document_tokens(self) -> int:
        """Windows begin at multiples of it; 1 where documents differ in length."""
        options = self.data and self.data.symbol_options
        return options.document_tokens if options else 1

    @property
    def target_ids(self) -> range:
        """The ids in the text of its targets."""
        options = self.data.symbol_options
        own = range(self.data.vocabulary.size) if options is None else options.target_ids
        return range(self.first_id + own.start, self.first_id + own.stop)


WHOLE = (TextPart(),)
"""A text of one source whose documents differ in length."""


@dataclass(frozen=True)
class SourceEntry:
    """One text source, as the spec knows it.

    Attributes:
        factory: the `kvlab.data.sources.TextSource` class, as ``module:class``. It is named,
            not imported: specs do not import what reads text. With ``divide`` a function that
            writes the dataset, see `kvlab.data.dataset_preparation`.
        reads_paths: whether it reads `data.paths`, whose licence the user states.
        options: the key of `data` that holds its `SourceOptions`, if it makes its own tokens, or
            what it is made of.
        divide: of a source that is made of others, a function of `data` that returns a `TextPart`
            of each, or one of all of ``data`` if it does not name them.
    """

    factory: str
    arguments: tuple[Any, ...] = ()
    reads_paths: bool = False
    options: str | None = None
    divide: str | None = None


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

    def find_symbol_problem(self) -> str | None:
        """Return which of the properties cannot be, and what it must be."""
        count, ids, length = self.symbols, self.target_ids, self.document_tokens
        if not is_count(count, 1):
            return f"symbols = {count}; define a property that is a whole number above 0"
        if not isinstance(ids, range) or ids.step != 1 or not 0 <= ids.start < ids.stop <= count:
            return f"target_ids = {ids}; define a property that is a range of ids up to {count}"
        if not is_count(length, 2):
            return f"document_tokens = {length}; define a property that is a whole number above 1"
        return None


class DocumentSource(Member, ABC):
    """A text source of a user's file: a function that yields documents.

    Attributes:
        name: the value of ``data.source``.
        licence: what the text may be used for, in words.
        options: what ``data.options`` may say, with a default for each; a `SourceOptions` for
            documents of symbols; None for nothing.
        reads_paths: whether it reads ``data.paths``. What these files hold is part of the text's
            identity.
        is_shuffled: whether the documents are in random order. They then keep their order, and
            reading stops at ``data.max_tokens`` or ``data.max_bytes``. Otherwise all are read, and
            sorted by their hash.
    """

    licence: ClassVar[str] = "not stated; say it in the file"
    options: ClassVar[type[SpecModel] | None] = None
    reads_paths: ClassVar[bool] = False
    is_shuffled: ClassVar[bool] = False

    @abstractmethod
    def documents(self, data: "DataConfig") -> Iterable[str]:
        """Yield the documents, always the same and in the same order.

        Args:
            data: with ``data.options``, and ``data.paths`` as absolute paths.
        """

    def fingerprint(self, data: "DataConfig") -> Any:  # noqa: ARG002
        """Return plain data that changes with what `documents` reads beside ``data.paths``.

        It must be fast: plans and trials ask for it.
        """
        return None

    @property
    def entry(self) -> SourceEntry:
        """How the spec knows it."""
        place = "kvlab.data.sources.user_documents:UserDocuments"
        return SourceEntry(place, (self,), reads_paths=self.reads_paths)
