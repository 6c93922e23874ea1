"""The process of a detached driver: ``python -m kvlab.cli.driver_process STORE SWEEP -- ARGS``.

It records itself in the store, runs ``kvlab ARGS`` and records the exit code. The output of a
process of its own is redirected to the driver's log from outside; a job copies its output there,
because its own output belongs to the cluster.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from kvlab.cli.main import main as kvlab
from kvlab.errors import KvlabError
from kvlab.store import Store
from kvlab.sweep.ops.detached_driver import create_driver_folder, driver_log, record_driver


def main() -> int:
    """Run one driver to its end and return its exit code."""
    separator = sys.argv.index("--")
    parser = argparse.ArgumentParser(prog="kvlab.cli.driver_process")
    parser.add_argument("store")
    parser.add_argument("sweep")
    parser.add_argument("--number", type=int, help="of the driver's folder, if it exists")
    parser.add_argument("--job", help="name of the Ray job that runs this driver")
    options = parser.parse_args(sys.argv[1:separator])
    store = Store(options.store)
    try:
        number = options.number or create_driver_folder(store, options.sweep)
        log = driver_log(store, options.sweep, number)
        output = _tee_output(log) if options.job else nullcontext()
        with record_driver(store, options.sweep, number, options.job) as codes, output:
            codes.append(kvlab(sys.argv[separator + 1 :]))
    except KvlabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return codes[-1]


@contextmanager
def _tee_output(path: Path) -> Iterator[None]:
    """Also write what Python code prints to a file."""
    with (
        open(path, "a", encoding="utf-8") as file,
        redirect_stdout(_Tee(sys.stdout, file)),
        redirect_stderr(_Tee(sys.stderr, file)),
    ):
        yield


class _Tee:
    """A stream that is also written to a file, without buffering."""

    def __init__(self, stream: TextIO, file: TextIO):
        self._stream, self._file = stream, file

    def write(self, text: str) -> int:
        self._file.write(text)
        self._file.flush()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


if __name__ == "__main__":
    sys.exit(main())
