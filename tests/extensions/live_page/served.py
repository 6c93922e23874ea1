"""The live page of a store, served to a test."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection

from kvlab.extensions.live_page.server import LivePage, listen, make_server


@contextmanager
def serve(page: LivePage, host: str = "127.0.0.1") -> Iterator[int]:
    """Serve a page during the block; give its port."""
    with listen(host, 0) as listener:
        server = make_server(page, host)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def ask(port: int, path: str, method: str = "GET", host: str = "localhost") -> tuple[int, str, str]:
    """Return status, type and text of an answer. The path is sent as it is."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers["Content-Type"], text
