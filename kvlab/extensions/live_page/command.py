"""`kvlab live`: follow the sweeps of a store on a page while they run."""

import argparse
from functools import partial

from kvlab.cli.shared_arguments import add_store
from kvlab.errors import UsageError
from kvlab.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    parser.add_argument("--port", type=int, default=5001, help="port of the page (default: 5001)")
    text = "listen there instead of on this machine alone (127.0.0.1)"
    parser.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help=text)


def run(options: argparse.Namespace) -> None:
    from kvlab.extensions.live_page.server import serve_live

    if not 1 <= options.port <= 65535:
        raise UsageError(f"--port = {options.port} is not a port; use 1 to 65535, such as 5001")
    serve_live(Store(options.store), options.host, options.port, partial(print, flush=True))
