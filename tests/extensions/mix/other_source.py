"""A second source of text: files at a place that a test sets."""

from kvlab.data.sources.local_files import LocalFiles
from kvlab.spec.source_options import SourceEntry

PATHS: list[str] = []


def _with_paths(data):
    return data.model_copy(update={"paths": tuple(PATHS)})


class Others(LocalFiles):
    def identity(self, data):
        return super().identity(_with_paths(data))

    def text_bytes(self, data):
        return super().text_bytes(_with_paths(data))

    def units(self, data, progress):
        return super().units(_with_paths(data), progress)


ENTRY = SourceEntry(f"{__name__}:Others")
