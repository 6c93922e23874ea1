"""What a text source is. The members are in `kvlab.data.sources`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from kvlab.data.data_dir import ProgressCallback
from kvlab.spec import DataConfig

TextUnit = dict[str, Any]
"""A part of the text that is read by itself, as plain data that travels to another process.

``key`` names its text: units with one key hold the same documents wherever they lie. ``bytes``
is its part of `Source.size`, where there is one.
"""


class TextSource(ABC):
    """One origin of documents.

    Attributes:
        licence: of the text, in words.
        shuffled: whether any beginning of the units is a fair sample of the whole. If it is
            not, documents are put in the order of their hash.
    """

    licence: str
    shuffled: bool

    @abstractmethod
    def identity(self, data: DataConfig) -> Any:
        """What the text is, as plain data: equal exactly if the documents are. Fast.

        Raises:
            DataError: the text is not there.
        """

    def size(self, data: DataConfig) -> int | None:  # noqa: ARG002
        """Bytes on disk of all units, for the time left; None where nobody knows.

        Raises:
            DataError: the text is not there.
        """
        return None

    def text_bytes(self, data: DataConfig) -> int | None:  # noqa: ARG002
        """UTF-8 bytes of all documents, about; None where nobody knows.

        Raises:
            DataError: the text is not there.
        """
        return None

    def missing_bytes(self, data: DataConfig, text_bytes: int) -> int:  # noqa: ARG002
        """Bytes to download for the first ``text_bytes`` of text, about.

        Raises:
            DataError: the text is not there.
        """
        return 0

    @abstractmethod
    def units(self, data: DataConfig, progress: ProgressCallback) -> Iterator[TextUnit]:
        """The units, in an order that depends on `identity` alone where ``shuffled``.

        Raises:
            DataError: the text is not there.
        """

    @abstractmethod
    def read(self, unit: TextUnit) -> Iterator[str]:
        """The documents of one unit, always the same, in the same order.

        Raises:
            DataError: the text is damaged, or is not what it was when the unit was made.
        """
