"""The text sources by their name in `data.source`."""

from kvlab.data.sources.docstrings import Docstrings
from kvlab.data.sources.fineweb_edu import FineWebEdu
from kvlab.data.sources.local_files import LocalFiles
from kvlab.data.text_source import TextSource

SOURCES: dict[str, TextSource] = {
    "docstrings": Docstrings(),
    "files": LocalFiles(),
    "fineweb-edu-10b": FineWebEdu("10BT"),
    "fineweb-edu-100b": FineWebEdu("100BT"),
    "fineweb-edu-350b": FineWebEdu("350BT"),
    "fineweb-edu-crawl": FineWebEdu(None),
}
