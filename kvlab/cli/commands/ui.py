"""`kvlab ui`: browse the results of a store in MLflow, served to this machine alone."""

import argparse
import sys

from kvlab.cli.commands.sync import sync_sweeps
from kvlab.cli.shared_arguments import add_store
from kvlab.errors import UsageError
from kvlab.store import Store
from kvlab.track import is_server, serve_ui, tracking_uri, view_address


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    parser.add_argument("--port", type=int, default=5000, help="of the page (default: 5000)")
    parser.add_argument("--tracking-uri", metavar="URI", help="a database other than the store's")


def run(options: argparse.Namespace) -> int:
    if not 1 <= options.port <= 65535:
        raise UsageError(f"--port = {options.port} is not a port; use 1 to 65535, such as 5000")
    store = Store(options.store)
    uri = tracking_uri(store.path, options.tracking_uri)
    if is_server(uri):
        print(f"the results are on {uri}; open it in a browser")
        return 0
    names = store.sweep_names()
    if not names and not (store.path / "mlflow.db").exists():
        text = f"--store = {options.store} holds no sweep yet; submit one first"
        raise UsageError(f"{text}, or name another store")
    mirrored = sync_sweeps(store, names, options.tracking_uri, report=True)
    server = f"http://127.0.0.1:{options.port}"
    for one in mirrored:
        print(f"{one.sweep}: {view_address(server, one.experiment)}")
    print("Ctrl-C ends it; `kvlab sync` brings it up to date while it runs", file=sys.stderr)
    only = mirrored[0].experiment if len(mirrored) == 1 else None
    start = "/experiments" if only is None else view_address("", only).removeprefix("/#")
    return serve_ui(store.path, options.tracking_uri, options.port, start)
