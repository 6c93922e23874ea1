"""Prepare datasets: text to tokens on disk, once for each text and tokenizer."""

import hashlib
import json
import shutil
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from kvlab.data.data_dir import ProgressCallback, get_data_dir, hold_lock, ignore_progress
from kvlab.data.dataset_builder import locate_documents, select_documents, write_dataset
from kvlab.data.disk_space import check_disk_space
from kvlab.data.shards import (
    Dataset,
    DatasetFacts,
    open_dataset,
    read_dataset_facts,
    read_manifest,
    verify_dataset,
)
from kvlab.data.sources import get_source
from kvlab.data.token_pieces import (
    DocumentTable,
    PieceJob,
    TokenizerPool,
    count_available_cpus,
    read_document_table,
)
from kvlab.errors import DataError, DatasetDamaged, StoreError
from kvlab.fs.atomic_files import replace_file
from kvlab.fs.lease import Fence
from kvlab.fs.sealed_files import set_aside, write_sealed_json
from kvlab.humanize import format_duration
from kvlab.spec import DataConfig

RECIPE = 2
"""Increased when the same text gives other tokens: reading, selection, order or split changed."""

REPORT_SECONDS = 1.0

SMALL_TEXT_BYTES = 1_000_000
"""A text with fewer bytes on disk is tokenized in one process."""


def dataset_identity(data: DataConfig) -> str:
    """Return 64 hex digits that name a prepared dataset: those of the text and of its settings.

    Equal digits mean equal tokens. Equal tokens may have several, such as after another release of
    a package; the digest of the tokens tells what a trial reads (`DatasetFacts`). The text's
    contents count, not where it lies. Nothing is tokenized.

    Raises:
        DataError: The text is missing.
    """
    facts = {
        "recipe": RECIPE,
        "source": data.source,
        "text": get_source(data.source).identity(data),
        "tokenizer": data.tokenizer,
        "max_bytes": data.max_bytes,
        "validation_fraction": data.validation_fraction,
    }
    if data.max_tokens is not None:
        facts["max_tokens"] = data.max_tokens
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def prepare_dataset(
    data: DataConfig, progress: ProgressCallback | None = None, *, workers: int | None = None
) -> Dataset:
    """Return the tokens of ``data`` from the data folder; tokenize the text if they are missing.

    The result depends on ``data`` and the text alone, not on ``workers`` or on interruptions. If
    several processes prepare the same dataset, one does and the others wait.

    Args:
        progress: Receives lines for the person who waits.
        workers: Processes to tokenize in; default one per available CPU.

    Raises:
        DataError: The text is missing, damaged or too short, or the disk is full.
    """
    progress = progress or ignore_progress
    identity = dataset_identity(data)
    folder = _datasets_dir() / identity[:16]
    dataset = _try_open(folder, identity)
    if not isinstance(dataset, Dataset):
        with hold_lock(_lock_path(folder), progress, "prepares this text") as fence:
            dataset = _try_open(folder, identity)
            if isinstance(dataset, DatasetDamaged):
                aside = set_aside(folder.parent, [folder.name], fence)
                progress(f"{dataset}; moved to {aside}, the text is prepared again")
            if not isinstance(dataset, Dataset):
                processes = workers or _count_processes(data)
                _build_dataset(data, identity, folder, progress, processes, fence)
        dataset = _try_open(folder, identity)
        if not isinstance(dataset, Dataset):
            raise dataset or DatasetDamaged(f"{folder} is gone")
    if data.licence is not None and data.licence != dataset.licence:
        dataset = _update_licence(folder, data.licence, progress)
    return dataset


def find_dataset(data: DataConfig) -> DatasetFacts | None:
    """Return the facts of a prepared dataset; None if it is still to be prepared.

    A damaged one is prepared again.

    Raises:
        DataError: The text is missing.
    """
    try:
        return read_dataset_facts(dataset_folder(data))
    except (FileNotFoundError, DatasetDamaged):
        return None


def dataset_folder(data: DataConfig) -> Path:
    """Return where the prepared tokens of ``data`` are, or will be.

    Raises:
        DataError: The text is missing.
    """
    return _datasets_dir() / dataset_identity(data)[:16]


def list_prepared_datasets() -> list[Path]:
    """Return the folders of all complete datasets, sorted."""
    return sorted(path.parent for path in _datasets_dir().glob("[!.]*/manifest.json"))


def set_aside_dataset(folder: Path, progress: ProgressCallback = ignore_progress) -> Path | None:
    """Move a damaged dataset into ``damaged/`` beside it, so that it is prepared again.

    Returns:
        Where it is now; None if it is not damaged, as another process has prepared it again.

    Raises:
        DataError: It cannot be moved.
    """
    with hold_lock(_lock_path(folder), progress, "changes this text"):
        if not verify_dataset(folder):
            return None
        try:
            return set_aside(folder.parent, [folder.name]) / folder.name
        except StoreError as error:
            raise DataError(str(error)) from None


def _count_processes(data: DataConfig) -> int:
    """Return one process for a small text, which is done before others have started."""
    size = get_source(data.source).size(data)
    return 1 if size is not None and size < SMALL_TEXT_BYTES else count_available_cpus()


def _update_licence(folder: Path, licence: str, progress: ProgressCallback) -> Dataset:
    """Record the user's licence for an existing dataset; it is not part of the identity."""
    with hold_lock(_lock_path(folder), progress, "changes this text"):
        content = {**read_manifest(folder), "licence": licence}
        write_sealed_json(folder / "manifest.json", content)
    return open_dataset(folder)


def _datasets_dir() -> Path:
    return get_data_dir() / "datasets"


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _work_dir(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.work")


def _try_open(folder: Path, identity: str) -> Dataset | DatasetDamaged | None:
    """Return the dataset in ``folder``, what is wrong with it, or None if there is none."""
    try:
        dataset = open_dataset(folder)
    except FileNotFoundError:
        is_there = folder.exists()
        return DatasetDamaged(f"{folder} has no manifest") if is_there else None
    except DatasetDamaged as error:
        return error
    if dataset.identity != identity:
        return DatasetDamaged(f"{folder} holds another text")
    return dataset


def _build_dataset(
    data: DataConfig,
    identity: str,
    folder: Path,
    progress: ProgressCallback,
    processes: int,
    fence: Fence,
) -> None:
    """Build ``folder`` in one step; the pieces and unfinished files lie in a folder beside it."""
    _remove_leftovers()
    work = _work_dir(folder)
    complete = work / "whole"
    shutil.rmtree(complete, ignore_errors=True)
    check_disk_space(data, folder.parent, work / "pieces")
    complete.mkdir(parents=True)
    started = time.monotonic()
    with TokenizerPool(processes, fence) as pool:
        jobs = _TokenizingRun(data, work / "pieces", progress, pool).run()
    selection = select_documents(
        locate_documents(jobs),
        is_shuffled=get_source(data.source).is_shuffled,
        max_bytes=data.max_bytes,
        max_tokens=data.max_tokens,
    )
    fence.check()
    write_dataset(complete, data, identity, jobs, selection, processes)
    replace_file(complete, folder, fence)
    shutil.rmtree(work, ignore_errors=True)
    dataset = open_dataset(folder)
    tokens = len(dataset.train) + len(dataset.validation)
    documents = dataset.train_documents + dataset.validation_documents
    seconds = time.monotonic() - started
    progress(f"{tokens:,} tokens of {documents:,} documents in {seconds:.1f} s: {folder}")


def _remove_leftovers() -> None:
    """Remove what a kill between the last two steps of `_build_dataset` left behind."""
    for folder in list_prepared_datasets():
        shutil.rmtree(_work_dir(folder), ignore_errors=True)


class _TokenizingRun:
    """Tokenize the units of one dataset, in order, up to its limit."""

    def __init__(
        self, data: DataConfig, folder: Path, progress: ProgressCallback, pool: TokenizerPool
    ):
        self._data, self._folder, self._progress, self._pool = data, folder, progress, pool
        self._source = get_source(data.source)

    def run(self) -> list[PieceJob]:
        """Return the finished jobs: no more than ``max_bytes`` or ``max_tokens`` need.

        Only a shuffled source can be cut off by tokens: the order of the others' documents is
        that of their hashes, so all of them are tokenized.
        """
        order_limit = None
        if self._data.max_bytes is not None and not self._source.is_shuffled:
            order_limit = self._find_order_limit(self._data.max_bytes)
        return self._run_jobs(order_limit, is_survey=False)

    def _find_order_limit(self, max_bytes: int) -> int:
        """Return the ``order`` at which documents reach ``max_bytes``, from a survey of all."""
        table = locate_documents(self._run_jobs(None, is_survey=True))
        selected = select_documents(table, is_shuffled=False, max_bytes=max_bytes).table
        return int(selected["order"][-1]) if len(selected) else 0

    def _run_jobs(self, order_limit: int | None, *, is_survey: bool) -> list[PieceJob]:
        limit = _Limit(self._data) if self._source.is_shuffled else None
        # Time left is measured by the limit, or by bytes on disk if everything is read.
        total = (limit and limit.maximum) or self._source.size(self._data)
        meter = ThroughputMeter("reading" if is_survey else "tokenizing", total, self._progress)
        jobs = self._iter_jobs(order_limit, is_survey)
        pending: deque[tuple[PieceJob, bool, Future[None]]] = deque()
        done: list[PieceJob] = []
        # Just enough to keep every process busy: the next unit may need a download.
        max_pending = 1 if self._pool.processes == 1 else 2 * self._pool.processes
        while True:
            while len(pending) < max_pending and (job := next(jobs, None)) is not None:
                is_new = not job.is_written
                pending.append((job, is_new, self._pool.submit(job)))
            if not pending:
                return done
            job, is_new, future = pending.popleft()
            self._pool.wait_for(future)
            done.append(job)
            table = read_document_table(job)
            size, tokens = int(table["bytes"].sum()), int(table["tokens"].sum())
            if limit is None or limit.maximum is None:
                meter.add(size, tokens, job.unit.get("bytes", 0), is_new=is_new)
                continue
            meter.add(size, tokens, int(table[limit.column].sum()), is_new=is_new)
            if limit.is_reached_with(table):
                return done

    def _iter_jobs(self, order_limit: int | None, is_survey: bool) -> Iterator[PieceJob]:
        is_second_pass = order_limit is not None  # the survey has reported already
        progress = ignore_progress if is_second_pass else self._progress
        for unit in self._source.units(self._data, progress):
            yield PieceJob(
                source=self._data.source,
                tokenizer=self._data.tokenizer,
                folder=str(self._folder),
                unit=unit,
                order_limit=order_limit,
                is_survey=is_survey,
            )


class _Limit:
    """Count distinct documents up to ``max_tokens`` or ``max_bytes``."""

    def __init__(self, data: DataConfig):
        self.column = "bytes" if data.max_tokens is None else "tokens"
        self.maximum = data.max_bytes if data.max_tokens is None else data.max_tokens
        self._tables: list[DocumentTable] = []
        self._read = 0
        self._needed = self.maximum or 0

    def is_reached_with(self, table: DocumentTable) -> bool:
        """Add a piece's documents; return whether the limit is reached.

        Repeated documents do not count. They are looked for only when enough has been read, and
        again when as much more as they leave missing.
        """
        assert self.maximum is not None
        self._tables.append(table)
        self._read += int(table[self.column].sum(dtype=np.uint64))
        if self._read < self._needed:
            return False
        tables = np.concatenate(self._tables)
        selected = select_documents(tables, is_shuffled=True, max_bytes=None).table
        missing = self.maximum - int(selected[self.column].sum(dtype=np.uint64))
        self._needed = self._read + max(0, missing)
        return missing <= 0


class ThroughputMeter:
    """Report the units done of one pass over a text, the rate, and the time left.

    Args:
        verb: What is done with the units.
        total: Sum of all `add`'s ``share``; None if unknown.
        progress: Receives the lines.
    """

    def __init__(self, verb: str, total: float | None, progress: ProgressCallback):
        self._verb, self._total, self._progress = verb, total, progress
        self._bytes = self._tokens = self._new_bytes = 0
        self._done_share = self._new_share = 0.0
        self._started = self._reported = time.monotonic()

    def add(self, size: int, tokens: int, share: float, *, is_new: bool) -> None:
        """Count one unit.

        Args:
            size: Bytes of its text.
            tokens: Its tokens.
            share: Its part of the total.
            is_new: Whether this run made it. Units of an earlier, interrupted run say nothing
                about the rate of this one.
        """
        self._bytes += size
        self._tokens += tokens
        self._done_share += share
        if is_new:
            self._new_bytes += size
            self._new_share += share
        now = time.monotonic()
        if now - self._reported >= REPORT_SECONDS:
            self._reported = now
            self._progress(self._format_line(now - self._started))

    def _format_line(self, seconds: float) -> str:
        line = f"{self._verb}: {self._bytes / 10**6:,.1f} MB of text"
        if self._new_bytes:
            line += f", {self._new_bytes / seconds / 10**6:.1f} MB/s"
        if self._tokens:
            line += f", {self._tokens / 10**6:,.1f} million tokens"
        if self._total is not None and self._new_share and self._done_share < self._total:
            left = (self._total - self._done_share) * seconds / self._new_share
            line += f", about {format_duration(left)} left"
        return line
