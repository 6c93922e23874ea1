"""`kvlab ui`: browse the results of a store in MLflow."""

import argparse
import sys

from kvlab.cli.commands.sync import sync_sweeps
from kvlab.cli.shared_arguments import add_store
from kvlab.errors import UsageError
from kvlab.humanize import redact_url
from kvlab.store import Store
from kvlab.track.connection import check_port, is_server, serve_ui, tracking_uri
from kvlab.track.sweep_summary import view_address


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    parser.add_argument("--port", type=int, default=5000, help="port of the page (default: 5000)")
    text = "MLflow database other than the store's"
    parser.add_argument("--tracking-uri", metavar="URI", help=text)


def run(options: argparse.Namespace) -> None:
    store, port = Store(options.store), options.port
    if not 1 <= port <= 65535:
        raise UsageError(f"--port = {port} is not a port; use 1 to 65535, such as 5000")
    uri = tracking_uri(store.path, options.tracking_uri)
    if is_server(uri):
        print(f"the results are on {redact_url(uri)}; open it in a browser")
        return
    names = store.sweep_names()
    if not names and not (store.path / "mlflow.db").exists():
        text = f"--store = {options.store} holds no sweep yet; submit one first"
        raise UsageError(f"{text}, or name another store")
    check_port(port)  # before a sync, which may take minutes
    for one in sync_sweeps(store, names, options.tracking_uri, report=True):
        print(f"{one.sweep}: {view_address(f'http://127.0.0.1:{port}', one.experiment)}")
    print("Ctrl-C ends it; `kvlab sync` brings it up to date while it runs", file=sys.stderr)
    serve_ui(store.path, options.tracking_uri, port)
