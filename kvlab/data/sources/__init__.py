"""The text sources and their contract. Their table is `kvlab.spec.data_config.SOURCES`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

from kvlab.data.data_dir import ProgressCallback
from kvlab.spec import DataConfig
from kvlab.spec.data_config import find_entry
from kvlab.spec.source_options import DocumentSource

TextUnit = dict[str, Any]
"""A part of the text that is read separately, as plain data that can be sent to another process.

``key`` identifies its text: units with equal keys hold the same documents, wherever they lie.
"""


class TextSource(ABC):
    """An origin of documents.

    Attributes:
        is_shuffled: Whether every prefix of the units is a fair sample of the text. If not,
            documents are sorted by their hash.
        is_grouped: Whether `read` names groups, which are held out as a whole.
    """

    licence: str
    is_shuffled: bool
    is_grouped: bool = False

    @abstractmethod
    def identity(self, data: DataConfig) -> Any:
        """Return plain data that is equal exactly if the documents are. It must be fast."""

    def text_bytes(self, data: DataConfig) -> int | None:  # noqa: ARG002
        """Return an estimate of the UTF-8 bytes of all documents; None if unknown."""
        return None

    @abstractmethod
    def units(self, data: DataConfig, progress: ProgressCallback) -> Iterator[TextUnit]:
        """Yield the units. If ``is_shuffled``, their order depends on `identity` alone."""

    @abstractmethod
    def read(self, unit: TextUnit) -> Iterator[tuple[str, str | None]]:
        """Yield the documents of one unit, always the same and in the same order, each with the
        name of its group.

        Documents of a group repeat each other, such as the docstrings of one module. They are
        either all held out or none of them. None: the document is alone in its group.

        Raises:
            DataError: The text is damaged, or has changed since the unit was made.
        """


def get_source(named: str | DocumentSource) -> TextSource:
    """Return the text source that `data.source` names."""
    entry = find_entry(named)
    source: TextSource = resolve_name(entry.factory)(*entry.arguments)
    return source
