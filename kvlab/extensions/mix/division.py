"""What a mix is made of: the settings, the weight and the ids of each source.

The ids of the text are those of `data.tokenizer`, then those of each source that makes its own
tokens. These have an end of text of their own, so none of their tokens stands in text.
"""

from collections.abc import Iterator
from typing import Any

from kvlab.extensions.mix.config import MixFields
from kvlab.spec import DataConfig
from kvlab.spec.data_config import SOURCES
from kvlab.spec.experiment import Experiment
from kvlab.spec.source_options import TextPart
from kvlab.spec.spec_model import FieldMessage

_WEIGHTS = 10**6

_OF_ONE_TEXT = ("loss_bytes", "positions", "needle", "text_parts")
"""Keys of `evaluation` that read held-out text in other windows than those of the mix."""


def divide(data: DataConfig) -> tuple[TextPart, ...]:
    """Return the sources of a mix: those of text in alphabetical order, then the others."""
    shares = MixFields.of(data).mix
    if shares is None:
        return (TextPart(data),)
    parts, free_id = [], data.vocabulary.size
    for source in sorted(shares, key=lambda name: (SOURCES[name].options is not None, name)):
        own = select_source(data, source)
        weight = max(1, round(_WEIGHTS * shares[source]))
        parts.append(TextPart(own, weight, 0 if own.symbol_options is None else free_id))
        free_id += 0 if own.symbol_options is None else own.vocabulary.size
    return tuple(parts)


def select_source(data: DataConfig, source: str) -> DataConfig:
    """Return the settings of one source of a mix, without those that it does not read.

    Limits on the amount of text hold for each source of text.
    """
    entry = SOURCES[source]
    changed: dict[str, Any] = {"source": source}
    changed |= {one.options: None for one in SOURCES.values() if one.options}
    if not entry.reads_paths:
        changed |= {"paths": (), "licence": None}
    if entry.options is not None:
        changed |= {"max_bytes": None, "max_tokens": None, "mask_documents": False}
        changed[entry.options] = options = getattr(data, entry.options)
        if options is not None:
            changed["tokenizer"] = f"symbols:{options.symbols}"
    return data.model_copy(update=changed)


def find_problems(experiment: Experiment) -> Iterator[FieldMessage]:
    """Yield what a mix cannot do: windows of half a document, and other windows than its own."""
    data, block_size = experiment.data, experiment.model.block_size
    if MixFields.of(data).mix is None:
        return
    for part in data.parts:
        if block_size % part.document_tokens:
            text = f"is not a multiple of the {part.document_tokens} tokens of a document of"
            use = -(-block_size // part.document_tokens) * part.document_tokens
            yield "model.block_size", f"{text} data.mix.{part.data.source}; use {use}"
        if part.data.symbol_options is not None and data.mask_documents:
            text = f"does not separate the documents of data.mix.{part.data.source}"
            yield "data.mask_documents", f"{text}; leave one out"
    for key in _OF_ONE_TEXT:
        if getattr(experiment.evaluation, key, None):
            text = "reads the held-out text in windows that hold no shares of data.mix"
            yield f"evaluation.{key}", f"{text}; leave it out"
