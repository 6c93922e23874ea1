"""The text sources by their name in `data.source`."""

from kvlab.data.source import Source
from kvlab.data.sources.docstrings import Docstrings
from kvlab.data.sources.files import Files
from kvlab.data.sources.fineweb_edu import FineWebEdu

SOURCES: dict[str, Source] = {
    "docstrings": Docstrings(),
    "files": Files(),
    "fineweb-edu-10b": FineWebEdu("10BT"),
    "fineweb-edu-100b": FineWebEdu("100BT"),
    "fineweb-edu-350b": FineWebEdu("350BT"),
    "fineweb-edu-crawl": FineWebEdu(None),
}
