"""What an evaluation has done before its end, in the folder ``partial/`` of its trial.

An evaluation is a sequence of batches, each computed by itself. The arrays of those that are done
are written from time to time, and when the evaluation is stopped. Another attempt at the trial
computes only the others, so that its numbers are bitwise those of an evaluation without a stop.
A file that is damaged, or of other weights, code or machine, is not used.
"""

import re
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.errors import RecordDamaged
from kvlab.fs.lease import Fence
from kvlab.fs.sealed_files import read_sealed_json, set_aside, write_sealed_json
from kvlab.store.provenance import Machine
from kvlab.store.store_paths import list_names

Arrays = dict[str, npt.NDArray[Any]]

WRITE_SECONDS = 20.0
"""Work that a killed process loses."""

WRITE_BYTES = 2**24
"""Arrays that are written before that, so that files stay small."""


_NAME = re.compile(r"[0-9]{1,9}[.]json\Z")


class PartialResults:
    """The batches of one trial's evaluation that are done, by name.

    Args:
        folder: where they are kept.
        identity: what the arrays depend on beside the trial and the machine, as plain data.
        log: gets a line about what is found.
        fence: of the lock on the trial.
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], log: Callable[[str], None], fence: Fence
    ):
        self._folder, self._identity, self._log, self._fence = folder, dict(identity), log, fence
        self._found: dict[str, Arrays] = {}
        self._new: dict[str, Arrays] = {}
        self._number, self._written_at = 0, 0.0

    @contextmanager
    def open(self, machine: Machine) -> Iterator["PartialResults"]:
        """Read what was kept on such a machine, and write what is new if the block raises.

        Raises:
            LeaseLost, StoreError: a file cannot be moved or written.
        """
        self._identity["machine"] = asdict(machine)
        for name in filter(_NAME.match, list_names(self._folder)):
            self._number = max(self._number, int(name.removesuffix(".json")))
            try:
                self._found |= self._read(self._folder / name)
            except RecordDamaged as error:
                set_aside(self._folder, [name], self._fence)
                self._log(f"{error}; its batches are computed again")
        if self._found:
            self._log(f"evaluation goes on: {len(self._found)} batches of it are done")
        self._written_at = time.monotonic()
        try:
            yield self
        except Exception:
            self._write()
            raise

    def _read(self, path: Path) -> dict[str, Arrays]:
        value = read_sealed_json(path, "identity", "batches")
        if value["identity"] != self._identity:
            raise RecordDamaged(f"{path} is of other weights, code or another machine")
        try:
            return {
                name: {
                    key: np.frombuffer(b64decode(one["base64"]), one["dtype"]).reshape(one["shape"])
                    for key, one in arrays.items()
                }
                for name, arrays in value["batches"].items()
            }
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RecordDamaged(f"{path} is damaged: {error}") from None

    def get(self, name: str) -> Arrays | None:
        """Return what an earlier attempt has kept of a batch; None if it has not."""
        return self._found.get(name)

    def __setitem__(self, name: str, arrays: Arrays) -> None:
        self._new[name] = arrays
        size = sum(array.nbytes for one in self._new.values() for array in one.values())
        if time.monotonic() - self._written_at > WRITE_SECONDS or size > WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        if not self._new:
            return
        self._number += 1
        batches = {
            name: {
                key: {
                    "dtype": array.dtype.name,
                    "shape": list(array.shape),
                    "base64": b64encode(array.tobytes()).decode(),
                }
                for key, array in arrays.items()
            }
            for name, arrays in self._new.items()
        }
        value = {"identity": self._identity, "batches": batches}
        write_sealed_json(self._folder / f"{self._number}.json", value, fence=self._fence)
        self._new, self._written_at = {}, time.monotonic()
