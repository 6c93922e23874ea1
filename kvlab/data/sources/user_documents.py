"""A source of a user's file: the documents that its function yields.

The function runs once, in the process that prepares the text. Its documents are tokenized in parts,
in several processes.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, final

from kvlab.data.data_dir import ProgressCallback, cached_sha256
from kvlab.data.sources import TextSource, TextUnit
from kvlab.data.sources.local_files import list_folder
from kvlab.data.tokenizers import encode_utf8
from kvlab.errors import DataError
from kvlab.spec import DataConfig
from kvlab.spec.extension_files import locate_error
from kvlab.spec.source_options import DocumentSource
from kvlab.spec.validation_errors import format_value

UNIT_CHARACTERS = 2_000_000


@final
class UserDocuments(TextSource):
    """Documents identified by the file's text, the options, and what the function reads."""

    def __init__(self, own: DocumentSource):
        self._own, self.licence, self.is_shuffled = own, own.licence, own.is_shuffled

    def identity(self, data: DataConfig) -> Any:
        options = data.options and data.options.model_dump(mode="json")
        try:
            own = json.dumps(self._own.fingerprint(data), allow_nan=False, sort_keys=True)
        except Exception as error:
            raise self._refuse("fingerprint", f"{type(error).__name__}: {error}", error) from None
        files: dict[Path, str] = {}
        for number, name in enumerate(data.paths):
            path = Path(name).expanduser()
            found = filter(Path.is_file, list_folder(path))
            inside = {one: str(one.relative_to(path)) for one in found}
            if not (inside := {path: path.name} if path.is_file() else inside):
                text = f"data.paths.{number} = {name} is no file, and no folder that has one"
                raise DataError(f"{text}; name what is to be read", field=f"data.paths.{number}")
            files |= inside
        digests = sorted([files[path], digest] for path, digest in cached_sha256([*files]).items())
        return [self._own.source.digest, options, own, digests]

    def documents(self, data: DataConfig) -> Iterator[str]:
        """Yield the documents.

        Raises:
            DataError: the function fails, or yields something else; with its line.
        """
        try:
            texts = self._own.documents(data)
            if not isinstance(texts, Iterable) or isinstance(texts, str | bytes):
                rule = f"returns {format_value(texts)}; yield one document after another"
                raise self._refuse("documents", rule)
            is_empty, symbols = True, data.symbol_options
            for text in texts:
                if not isinstance(text, str):
                    frame = getattr(texts, "gi_frame", None)  # where it yields
                    rule = f"yields {format_value(text)}, which is no str; yield text"
                    raise self._refuse("documents", rule, line=frame and frame.f_lineno)
                if symbols and len(text) + 1 != symbols.document_tokens:
                    rule = f"yields {len(text)} symbols, {len(text) + 1} tokens with the end of"
                    rule += f" text, and document_tokens is {symbols.document_tokens}; correct one"
                    raise self._refuse("documents", rule)
                is_empty = is_empty and not text.strip()
                yield text
            if is_empty:
                raise self._refuse("documents", "yields no text; yield one document at least")
        except DataError:
            raise
        except Exception as error:
            raise self._refuse("documents", f"{type(error).__name__}: {error}", error) from None

    def units(self, data: DataConfig, progress: ProgressCallback) -> Iterator[TextUnit]:  # noqa: ARG002
        before, part, size = self.identity(data), list[str](), 0
        for text in self.documents(data):
            part.append(text)
            size += len(text)
            if size >= UNIT_CHARACTERS:
                yield _make_unit(part)
                part, size = [], 0
        if part:
            yield _make_unit(part)
        if self.identity(data) != before:
            text = f"data.source = {self._own}: what it reads changed while it was read"
            raise DataError(f"{text}; wait for its writer, run again")

    def read(self, unit: TextUnit) -> Iterator[tuple[str, str | None]]:
        yield from ((text, None) for text in unit["documents"])

    def _refuse(
        self, function: str, rule: str, error: Exception | None = None, line: int | None = None
    ) -> DataError:
        """Return an error with the line of the file: where it fails, or else of the function."""
        code = getattr(getattr(type(self._own), function), "__code__", None)
        place = f"{self._own.source.name}:{line or getattr(code, 'co_firstlineno', 1)}"
        place = (error and locate_error(error)) or place
        text = f"data.source = {self._own} fails at {place}: {function}: {rule}"
        return DataError(text, field="data.source")


def _make_unit(documents: list[str]) -> TextUnit:
    digests = b"".join(hashlib.sha256(encode_utf8(one)).digest() for one in documents)
    return {"key": f"documents {hashlib.sha256(digests).hexdigest()}", "documents": documents}
