"""`data` of an experiment: which text, and how it becomes tokens. Also the table of sources."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field, PlainValidator, SerializeAsAny, WithJsonSchema
from pydantic import ValidationInfo as Info

from kvlab.errors import PretrainedError
from kvlab.own_extensions import extend, find_members
from kvlab.spec import spec_model as spec
from kvlab.spec.checkpoint_tools import find_checkpoint_tool
from kvlab.spec.members import name_or_member, read_options
from kvlab.spec.source_options import DocumentSource, SourceEntry, SourceOptions, TextPart
from kvlab.spec.spec_model import PositiveInt, Problems, SpecModel, TextRule, TupleOf

SOURCES: dict[str, SourceEntry] = {
    "docstrings": SourceEntry("kvlab.data.sources.docstrings:Docstrings"),
    "files": SourceEntry("kvlab.data.sources.local_files:LocalFiles", reads_paths=True),
    **find_members("sources"),
}
"""`data.source` -> its entry: the one table of text sources."""


if TYPE_CHECKING:
    SourceName = str | DocumentSource
else:
    SourceName = name_or_member(DocumentSource, lambda: SOURCES)


def find_entry(source: str | DocumentSource) -> SourceEntry:
    """Return the entry of what `data.source` names."""
    return SOURCES[source] if isinstance(source, str) else source.entry


def _read_options(value: Any, info: Info) -> SpecModel | None:
    """Return the options of a source of a user's file; their defaults if none are written."""
    own = getattr(info.data.get("source"), "options", None)
    if own is None:
        if value and "source" in info.data:  # else it is wrong
            spec.raise_problems([("", f"is not read by source: {info.data['source']}; remove it")])
        return None
    return read_options(own, {} if value is None else value, f"source: {info.data['source']}")


_TOKENIZER = TextRule(
    r"^(gpt2(:[1-9][0-9]{0,5})?|bytes|symbols:[1-9][0-9]{0,4}|[^\n]*/[^\n]*)$",
    "is not a tokenizer; use gpt2, gpt2:2048, bytes, or the folder or repository of a checkpoint",
)


class Vocabulary(NamedTuple):
    """Ids 0 to ``size - 1``, of which ``end_of_text`` precedes every document."""

    size: int
    end_of_text: int


@extend("data")
class DataConfig(SpecModel):
    """`data`: which text, and how it becomes tokens."""

    # what selects the text is in the digest of its tokens, which `kvlab.trial.fingerprint` adds
    excluded_from_identity = frozenset(
        {"source", "paths", "licence", "max_bytes", "max_tokens", "validation_fraction"}
    )
    omitted_defaults = frozenset({"mask_documents", "options"})

    source: SourceName = "docstrings"
    """Where the text comes from. Example: files, paths: [../texts]"""
    tokenizer: Annotated[str, _TOKENIZER] = "gpt2"
    """gpt2, gpt2:N (its first N ranks), bytes, symbols:N for a source that makes its tokens, or a
    checkpoint's: its Hugging Face folder or repository, with a slash.
    Example: 'gpt2:2048'"""
    options: Annotated[
        SerializeAsAny[SpecModel] | None,
        PlainValidator(_read_options),
        WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]}),
        # digests of earlier records have no such key
        Field(exclude_if=lambda options: options is None),
    ] = None
    """What a source of a file of `extensions` lets you choose.
    Default: none. Example: {}"""
    paths: TupleOf[str] = ()
    """Files or folders of text, relative to the spec's file, for source: files.
    Example: [../texts], source: files"""
    licence: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    """What the text may be used for, in words, for source: files; recorded with the tokens and with
    every result.
    Example: CC BY 4.0, source: files, paths: [../texts]"""
    max_bytes: PositiveInt | None = None
    """Stop after this many bytes of text (whole documents).
    Unit: bytes. Default: all. Example: 4e6"""
    max_tokens: PositiveInt | None = None
    """Stop after this many tokens (whole documents). Unit: tokens. Default: all. Example: 2.2e8"""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Share of the documents held out, chosen by document hash; of one .txt file alone, of its end.
    Unit: share. Example: 0.025"""

    mask_documents: bool = False
    """Attention never crosses from one document into another, and positions start at 0 in each;
    default documents are packed and see those before them.
    Example: true"""

    def _find_problems(self) -> Problems:
        if self.max_bytes is not None and self.max_tokens is not None:
            yield "max_tokens", "and max_bytes both say where to stop; remove one"
        if self.tokenizer.startswith("gpt2:") and not 256 <= self._ranks <= 50256:
            text = "keeps too few or too many ranks; use 256 to 50256, such as gpt2:2048"
            yield "tokenizer", text
        if self.has_checkpoint_tokenizer:
            try:
                find_checkpoint_tool("vocabulary")
            except PretrainedError as error:  # the extension is not there
                yield "tokenizer", f"names a checkpoint: {error}"
        parts, hint = self.parts, f"not {self.source}; remove one"
        named = {self.source, *(part.data.source for part in parts)}
        has_reader = any(find_entry(source).reads_paths for source in named)
        readers = " or ".join(name for name, entry in SOURCES.items() if entry.reads_paths)
        if has_reader and not self.paths:
            yield "source", "needs data.paths; name at least one file or folder"
        if not has_reader and self.paths:
            yield "paths", f"is read only by source: {readers}, {hint}"
        if not has_reader and self.licence is not None:
            yield "licence", f"is known for {self.source}; set it only for source: {readers}"
        for source, entry in SOURCES.items():
            other = entry.options
            if other and source not in named and getattr(self, other) is not None:
                yield other, f"is read only by source: {source}, not {self.source}; remove one"
        for part in parts:
            yield from part.data._find_token_problems()

    def _find_token_problems(self) -> Problems:
        """Yield what does not fit of one source, its options and the tokenizer."""
        entry, options = find_entry(self.source), self.symbol_options
        key = entry.options
        is_symbols = self.tokenizer.startswith("symbols:")
        if key and getattr(self, key) is None:
            hint = "name its sources" if entry.divide else f"write {key}: {{}} for its defaults"
            yield "source", f"needs data.{key}; {hint}"
            return
        if options is None and is_symbols:
            yield "tokenizer", f"does not hold the text of source: {self.source}; use gpt2 or bytes"
        elif options is not None and (problem := options.find_symbol_problem()):
            yield key or "options", f"has {problem}"
        elif options is not None and (not is_symbols or self._ranks < options.symbols):
            text = f"does not hold the {options.symbols} symbols of source: {self.source}"
            yield "tokenizer", f"{text}; use symbols:{options.symbols}"

    @property
    def symbol_options(self) -> SourceOptions | None:
        """The options of a source that makes its own tokens; None of other sources."""
        own = getattr(self, find_entry(self.source).options or "options")
        return own if isinstance(own, SourceOptions) else None

    def identity(self) -> dict[str, Any]:
        own = self.source
        code = {} if isinstance(own, str) else {"source": f"{own} {own.source.digest}"}
        return super().identity() | code | {"tokenizer": self.tokenizer_identity}

    @property
    def has_checkpoint_tokenizer(self) -> bool:
        return "/" in self.tokenizer

    @property
    def tokenizer_identity(self) -> str:
        """The tokenizer's name; of a checkpoint's its contents, wherever it lies.

        Raises:
            DataError: the checkpoint's folder has none.
        """
        if not self.has_checkpoint_tokenizer:
            return self.tokenizer
        identity: str = find_checkpoint_tool("identify_tokenizer")(self.tokenizer)
        return identity

    @property
    def parts(self) -> tuple[TextPart, ...]:
        """The sources of the text, in the order in which its tokens are stored."""
        divide = find_entry(self.source).divide
        parts: tuple[TextPart, ...] = resolve_name(divide)(self) if divide else (TextPart(self),)
        return parts

    @property
    def target_ids(self) -> tuple[range, ...] | None:
        """The ids of tokens that are targets of training and scoring; None for all."""
        parts = self.parts
        chooses = any(part.data.symbol_options for part in parts)
        return tuple({part.target_ids: None for part in parts}) if chooses else None

    @property
    def vocabulary(self) -> Vocabulary:
        """The ids of the tokenizer.

        Raises:
            PretrainedError: it is a checkpoint's, which is not on this machine.
        """
        if self.has_checkpoint_tokenizer:
            return Vocabulary(*find_checkpoint_tool("vocabulary")(self.tokenizer))
        return Vocabulary(self._ranks + 1, self._ranks)

    @property
    def _ranks(self) -> int:
        """The number of byte-pair ranks or symbols kept; 256 is single bytes only."""
        name, _, count = self.tokenizer.partition(":")
        return 256 if name == "bytes" else int(count or 50256)

    @property
    def vocab_size(self) -> int:
        """The ids of all parts. Raises PretrainedError as `vocabulary`."""
        ends: list[int] = [part.first_id + part.data.vocabulary.size for part in self.parts]
        return max(ends)

    @property
    def document_start(self) -> int | None:
        """The token at which attention and positions start anew; None without masks."""
        return self.vocabulary.end_of_text if self.mask_documents else None
