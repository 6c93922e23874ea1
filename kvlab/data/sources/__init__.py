"""The text sources. Their table is `kvlab.spec.data_config.SOURCES`."""

from functools import cache
from pkgutil import resolve_name

from kvlab.data.text_source import TextSource
from kvlab.spec.data_config import SOURCES, SourceEntry


def get_source(name: str) -> TextSource:
    """Return the text source that `data.source` names."""
    return _make_source(SOURCES[name])


@cache
def _make_source(entry: SourceEntry) -> TextSource:
    source: TextSource = resolve_name(entry.factory)(*entry.arguments)
    return source
