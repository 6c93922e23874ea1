"""The identity of a text: what it is and how it is cut into tokens, never where it lies."""

import hashlib
import json
import shutil
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from kvlab.data.data_dir import ProgressCallback, get_data_dir, hold_lock, ignore_progress
from kvlab.data.dataset_builder import locate_documents, select_documents, write_dataset
from kvlab.data.disk_space import check_disk_space
from kvlab.data.shards import Dataset, open_dataset, read_manifest
from kvlab.data.sources import get_source
from kvlab.data.token_pieces import PieceJob, TokenizerPool, available_cpus, read_document_table
from kvlab.errors import DataError
from kvlab.fs.atomic_files import replace_file, write_json
from kvlab.fs.lease import Fence
from kvlab.spec import DataConfig

RECIPE = 1
"""Goes up when the same text comes to give other tokens: reading, cleaning, order, split."""


def dataset_identity(data: DataConfig) -> str:
    """64 hex digits, equal exactly if `prepare` gives equal tokens. Nothing is tokenised.

    Raises:
        DataError: the text is not there.
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


# How much text is done, how fast, and how long the rest takes: a line now and then.


REPORT_SECONDS = 1.0


class ThroughputMeter:
    """Counts the units of one pass over a text.

    Args:
        verb: what is done with them.
        total: of what `add` calls ``share``; None where it is not known how much there is.
        report: takes the lines.
    """

    def __init__(self, verb: str, total: float | None, report: ProgressCallback):
        self._verb, self._total, self._report = verb, total, report
        self._bytes = self._tokens = self._new_bytes = 0
        self._done = self._new = 0.0
        self._started = self._told = time.monotonic()

    def add(self, size: int, tokens: int, share: float, *, is_new: bool) -> None:
        """One unit more.

        Args:
            size, tokens: bytes of its text, and what they became.
            share: its part of the total.
            is_new: it was not there from an earlier, interrupted run, which says nothing
                about how fast this one is.
        """
        self._bytes += size
        self._tokens += tokens
        self._done += share
        if is_new:
            self._new_bytes += size
            self._new += share
        now = time.monotonic()
        if now - self._told >= REPORT_SECONDS:
            self._told = now
            self._report(self._line(now - self._started))

    def _line(self, seconds: float) -> str:
        line = f"{self._verb}: {self._bytes / 10**6:,.1f} MB of text"
        if self._new_bytes:
            line += f", {self._new_bytes / seconds / 10**6:.1f} MB/s"
        if self._tokens:
            line += f", {self._tokens / 10**6:,.1f} million tokens"
        if self._total is not None and self._new and self._done < self._total:
            line += f", about {_format_time_left((self._total - self._done) * seconds / self._new)} left"
        return line


def _format_time_left(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# Text to tokens on disk, once: `prepare`.


def prepare_dataset(
    data: DataConfig, progress: ProgressCallback | None = None, *, workers: int | None = None
) -> Dataset:
    """The tokens of ``data``, from the data folder or made now.

    The result depends on ``data`` and the text alone, not on ``workers``, on interruptions or on
    other processes that prepare at the same time: one of them does it, the others wait.

    Args:
        progress: takes lines for a person.
        workers: processes to tokenise in; default one a processor.

    Raises:
        DataError: the text is missing, damaged or too little, or the disk is full.
    """
    report = progress or ignore_progress
    name = dataset_identity(data)
    folder = _datasets_dir() / name[:16]
    if not _is_prepared(folder):
        lock = _datasets_dir() / f".{name[:16]}.lock"
        waiting = "another process is preparing this text; waiting"
        with hold_lock(lock, report, waiting) as fence:
            if not _is_prepared(folder):
                _build_dataset(data, name, folder, report, workers or available_cpus(), fence)
    dataset = open_dataset(folder)
    if dataset.identity != name:
        raise DataError(f"{folder} holds another text; remove it, prepare again")
    if dataset.short is not None:
        report(f"warning: {dataset.short}")
    if data.licence is not None and data.licence != dataset.licence:
        dataset = _update_licence(folder, data.licence, report)
    return dataset


def list_prepared_datasets() -> list[Path]:
    """The folders of all whole datasets, sorted."""
    return sorted(path.parent for path in _datasets_dir().glob("[!.]*/manifest.json"))


def _update_licence(folder: Path, licence: str, report: ProgressCallback) -> Dataset:
    """The licence is no part of a text's identity: what was prepared before takes the new one."""
    lock = folder.with_name(f".{folder.name}.lock")
    with hold_lock(lock, report, "another process holds this text; waiting"):
        write_json(folder / "manifest.json", {**read_manifest(folder), "licence": licence})
    return open_dataset(folder)


def _datasets_dir() -> Path:
    return get_data_dir() / "datasets"


def _is_prepared(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except FileNotFoundError:
        return False
    return True


def _build_dataset(
    data: DataConfig, name: str, folder: Path, report: ProgressCallback, workers: int, fence: Fence
) -> None:
    """Makes ``folder`` appear whole. What is half made waits in a folder beside it."""
    _remove_leftovers()
    work = _work_dir(folder)
    whole = work / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    check_disk_space(data, folder.parent, work / "pieces")
    whole.mkdir(parents=True)
    started = time.monotonic()
    with TokenizerPool(workers) as pool:
        jobs = _TokenizingRun(data, work / "pieces", report, pool).run()
    source = get_source(data.source)
    table = select_documents(
        locate_documents(jobs),
        shuffled=source.shuffled,
        max_bytes=data.max_bytes,
        max_tokens=data.max_tokens,
    )
    fence.check()
    write_dataset(whole, data, name, jobs, table)
    replace_file(whole, folder, fence)
    shutil.rmtree(work, ignore_errors=True)
    tokens = int(table["tokens"].sum())
    seconds = time.monotonic() - started
    report(f"{tokens:,} tokens of {len(table):,} documents in {seconds:.1f} s: {folder}")


def _work_dir(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.work")


def _remove_leftovers() -> None:
    """Removes what a kill between the last two steps of `_make` left behind."""
    for folder in list_prepared_datasets():
        shutil.rmtree(_work_dir(folder), ignore_errors=True)


class _TokenizingRun:
    """The pieces of one dataset, made in order by ``pool``."""

    def __init__(
        self, data: DataConfig, folder: Path, report: ProgressCallback, pool: TokenizerPool
    ):
        self._data, self._folder, self._report, self._pool = data, folder, report, pool
        self._source = get_source(data.source)

    def run(self) -> list[PieceJob]:
        """The jobs done; no more than ``max_bytes`` or, of shuffled text, ``max_tokens`` need."""
        limit = None
        if self._data.max_bytes is not None and not self._source.shuffled:
            limit = self._order_limit(self._data.max_bytes)
        return self._done(limit, survey=False)

    def _order_limit(self, max_bytes: int) -> int:
        """Where the hash order reaches ``max_bytes``: known once every document was seen."""
        table = locate_documents(self._done(None, survey=True))
        taken = select_documents(table, shuffled=False, max_bytes=max_bytes)
        return int(taken["order"][-1]) if len(taken) else 0

    def _done(self, limit: int | None, *, survey: bool) -> list[PieceJob]:
        counted = "bytes" if self._data.max_tokens is None else "tokens"
        most = self._data.max_bytes if counted == "bytes" else self._data.max_tokens
        stop_at = most if self._source.shuffled else None
        # what is left is told by what is asked for, or, where all is read, by bytes on disk
        total = stop_at or self._source.size(self._data)
        meter = ThroughputMeter("reading" if survey else "tokenising", total, self._report)
        jobs = self._jobs(limit, survey)
        waiting: deque[tuple[PieceJob, bool, Future[None]]] = deque()
        done: list[PieceJob] = []
        seen: set[int] = set()
        taken = 0
        # Ahead only as far as keeps every process busy: the next unit may cost a download.
        ahead = 1 if self._pool.count == 1 else 2 * self._pool.count
        while True:
            while len(waiting) < ahead and (job := next(jobs, None)) is not None:
                is_new = not job.table_path.exists()
                waiting.append((job, is_new, self._pool.submit(job)))
            if not waiting:
                return done
            job, is_new, future = waiting.popleft()
            future.result()
            done.append(job)
            table = read_document_table(job)
            counts = {name: int(table[name].sum()) for name in ("bytes", "tokens")}
            share = counts[counted] if stop_at else job.unit.get("bytes", 0)
            meter.add(counts["bytes"], counts["tokens"], share, is_new=is_new)
            if stop_at is not None:
                for document, size in zip(
                    table["hash"].tolist(), table[counted].tolist(), strict=True
                ):
                    taken += 0 if document in seen else size
                    seen.add(document)
                if taken >= stop_at:
                    return done

    def _jobs(self, limit: int | None, survey: bool) -> Iterator[PieceJob]:
        again = limit is not None  # what there is to say was said by the survey
        for unit in self._source.units(self._data, ignore_progress if again else self._report):
            yield PieceJob(
                source=self._data.source,
                tokenizer=self._data.tokenizer,
                folder=str(self._folder),
                unit=unit,
                order_limit=limit,
                survey=survey,
            )
