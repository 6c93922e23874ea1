"""`kvlab ui`: browse the results of a store in MLflow, or follow its sweeps while they run."""

import argparse
import sys
from functools import partial

from kvlab.cli.commands.sync import sync_sweeps
from kvlab.cli.shared_arguments import add_flag, add_store
from kvlab.errors import UsageError
from kvlab.store import Store
from kvlab.track.connection import is_server, serve_ui, tracking_uri
from kvlab.track.sweep_summary import view_address

MLFLOW_PORT, LIVE_PORT = 5000, 5001


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    text = "port of the page (default: 5000, with --live 5001)"
    parser.add_argument("--port", type=int, help=text)
    text = "MLflow database other than the store's"
    parser.add_argument("--tracking-uri", metavar="URI", help=text)
    add_flag(parser, "--live", "follow sweeps while they run: trials, curves, time left")
    text = "with --live: listen there instead of on this machine alone (127.0.0.1)"
    parser.add_argument("--host", metavar="ADDRESS", help=text)


def run(options: argparse.Namespace) -> None:
    default = LIVE_PORT if options.live else MLFLOW_PORT
    port = default if options.port is None else options.port
    if not 1 <= port <= 65535:
        raise UsageError(f"--port = {port} is not a port; use 1 to 65535, such as 5000")
    store = Store(options.store)
    if options.live:
        if options.tracking_uri is not None:
            text = f"--tracking-uri = {options.tracking_uri} is not read with --live, which follows"
            raise UsageError(f"{text} the store; leave one of them out")
        from kvlab.cli.live_server import serve_live

        serve_live(store, options.host or "127.0.0.1", port, partial(print, flush=True))
        return
    if options.host is not None:
        text = f"--host = {options.host} is read only with --live, as MLflow's page stays on this"
        raise UsageError(f"{text} machine; add --live, or leave it out")
    uri = tracking_uri(store.path, options.tracking_uri)
    if is_server(uri):
        print(f"the results are on {uri}; open it in a browser")
        return
    names = store.sweep_names()
    if not names and not (store.path / "mlflow.db").exists():
        text = f"--store = {options.store} holds no sweep yet; submit one first"
        raise UsageError(f"{text}, or name another store")
    for one in sync_sweeps(store, names, options.tracking_uri, report=True):
        print(f"{one.sweep}: {view_address(f'http://127.0.0.1:{port}', one.experiment)}")
    print("Ctrl-C ends it; `kvlab sync` brings it up to date while it runs", file=sys.stderr)
    serve_ui(store.path, options.tracking_uri, port)
