"""What a detached driver runs: ``python -m kvlab.cli.driver_process STORE SWEEP ... -- ARGS``.

It says in the store that it is there, runs `kvlab ARGS`, and says how that ended. A process of
its own has its log as its output already; a job's output belongs to the cluster, and goes to
the log as well.
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


def main(arguments: list[str] | None = None) -> int:
    """Runs one driver to its end; returns its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    at = given.index("--")
    parser = argparse.ArgumentParser(prog="kvlab.cli.driver_process")
    parser.add_argument("store")
    parser.add_argument("sweep")
    parser.add_argument("--number", type=int, help="of the folder that was made for it")
    parser.add_argument("--job", help="that it is")
    options = parser.parse_args(given[:at])
    store = Store(options.store)
    try:
        number = options.number or create_driver_folder(store, options.sweep)
        log = driver_log(store, options.sweep, number)
        shown = _tee_output(log) if options.job else nullcontext()
        with record_driver(store, options.sweep, number, options.job) as code, shown:
            code.append(kvlab(given[at + 1 :]))
    except KvlabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return code[-1]


@contextmanager
def _tee_output(path: Path) -> Iterator[None]:
    """Sends what Python code prints to a file too."""
    with (
        open(path, "a", encoding="utf-8") as file,
        redirect_stdout(_Tee(sys.stdout, file)),
        redirect_stderr(_Tee(sys.stderr, file)),
    ):
        yield


class _Tee:
    """A stream that is written to a file as well, at once."""

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
