"""What captures ask of torch.cuda, on CPU."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch

from kvlab.model.generate import capture_stream


class FakeCuda:
    """Graphs that compute at their capture and not when they are replayed.

    Attributes:
        streams: those that were made.
        log: the stream of each capture, and ``replay``.
    """

    def __init__(self, monkeypatch):
        self.log, self.streams = [], []
        fakes = {
            "Stream": self._make_stream,
            "CUDAGraph": self._make_graph,
            "graph": self._capture,
            "stream": lambda _stream: nullcontext(),
            "current_stream": self._make_waiting,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        capture_stream.cache_clear()

    def _make_stream(self, _device):
        self.streams.append(self._make_waiting())
        return self.streams[-1]

    def _make_graph(self):
        return SimpleNamespace(replay=lambda: self.log.append("replay"), pool=lambda: None)

    @staticmethod
    def _make_waiting():
        return SimpleNamespace(wait_stream=lambda _other: None)

    @contextmanager
    def _capture(self, _graph, stream, **_pool):
        self.log.append(stream)
        yield
