"""`kvlab bench`: measure what a KV cache costs and saves, as tables.

Imports torch only when it runs.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.benchmark.measurement import Measurement, StopRule, TableLayout
from kvlab.cli.shared_arguments import (
    add_device,
    add_store,
    add_threads,
    add_variants,
    list_variants,
    memory_size,
    positive_int,
    resolve_device,
    set_threads,
)
from kvlab.cli.terminal import format_table, show_status_line
from kvlab.errors import UsageError
from kvlab.humanize import format_count, format_number
from kvlab.spec.benchmark_config import MEASURES

if TYPE_CHECKING:
    from kvlab.benchmark.session import BenchmarkSettings, Session, Variant
    from kvlab.spec.conversations_config import ConversationsConfig


DTYPES = ("float32", "bfloat16", "float16")

DEFAULTS = StopRule()

EXAMPLES = """
examples:
  kvlab bench gpt2 --compare model.n_kv_head=1 --contexts 128 512 960
  kvlab bench experiments/quickstart.yaml 3f2a --only latency throughput --batches 1 8
  kvlab bench gpt2 --only limit --limit 4GiB
  kvlab bench gpt2 --only task --text moby-dick.txt
  kvlab bench gpt2 --only conversations --load turns=5 prompt_tokens=96 reply_tokens=32
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    measures = (f"  {name:11} {entry.summary}\n" for name, entry in MEASURES.items())
    parser.epilog = f"parts:\n{''.join(measures)}{EXAMPLES}"
    parser.add_argument(
        "target", nargs="+",
        help="a preset, a spec file (both with random weights), a trial id, or a checkpoint",
    )  # fmt: skip
    add_variants(parser)
    defaults = " ".join(name for name, entry in MEASURES.items() if entry.is_default)
    parser.add_argument(
        "--only", nargs="+", choices=list(MEASURES), metavar="PART",
        help=f"parts to measure (default: {defaults}; and task, limit with their options)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=[None], metavar="DTYPE",
        help=f"of the weights: {', '.join(DTYPES)}; several are variants (default: as trials are"
        " measured, on a GPU in the training's precision; without an experiment float32)",
    )  # fmt: skip
    add_device(parser)
    add_threads(parser)
    parser.add_argument(
        "--prompt-tokens", type=positive_int, help="default half the smallest block size"
    )
    parser.add_argument("--new-tokens", type=positive_int, default=16, help="default 16")
    parser.add_argument(
        "--contexts", type=positive_int, nargs="+", metavar="N",
        help="prompt lengths of latency (default: an eighth, half, and all of the block size)",
    )  # fmt: skip
    parser.add_argument("--batches", type=positive_int, nargs="+", default=[1, 4], metavar="N")
    parser.add_argument(
        "--relative-error", type=_fraction, default=DEFAULTS.relative_error, metavar="X",
        help="measure until every median is known to this, and every ratio of variants to 0.02"
        f" (default {DEFAULTS.relative_error})",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=positive_int, nargs=2, default=[DEFAULTS.min_rounds, DEFAULTS.max_rounds],
        metavar=("LEAST", "MOST"),
        help=f"turns of every variant (default {DEFAULTS.min_rounds} {DEFAULTS.max_rounds})",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=positive_int, default=DEFAULTS.seconds,
        help="start no round after this time, per context or batch"
        f" (default {DEFAULTS.seconds:.0f})",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=memory_size, metavar="SIZE", help="bytes that the part limit may use"
    )
    parser.add_argument("--text", type=Path, help="Moby Dick as plain text, for the part task")
    parser.add_argument(
        "--load", nargs="+", metavar="KEY=VALUE",
        help="keys of benchmark.conversations, for the part conversations; see `kvlab schema"
        " experiment --doc` (default: those of the experiment, where a target is one)",
    )  # fmt: skip
    parser.add_argument("--remeasure", action="store_true", help="measure the device's peaks again")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the curves, SVG and PNG")
    parser.add_argument("--json", action="store_true", help="one JSON line per measurement")
    add_store(parser)


def run(options: argparse.Namespace) -> int:
    names = _select_measures(options)
    session = _make_session(options)
    _check_caches(session, names)
    lines: list[Measurement] = []
    for name in names:
        measured = []
        for line in _run_measure(session, name):
            measured.append(line)
            if options.json:
                print(line.model_dump_json(), flush=True)
        if not options.json:
            for text in format_tables(name, measured):
                print(f"\n{text}", flush=True)
        lines += measured
    if options.plots:
        _write_plots(options.plots, lines)
    return 0 if lines else 1  # everything was left out, and the reason was printed


def _check_caches(session: "Session", names: list[str]) -> None:
    from kvlab.benchmark.session import check_caches_fit

    if any(MEASURES[name].per_batch for name in names):
        check_caches_fit(session)


def _run_measure(session: "Session", name: str) -> Iterator[Measurement]:
    from kvlab.benchmark.session import explain_out_of_memory

    session.activity = name
    with explain_out_of_memory(session):
        yield from import_module(MEASURES[name].module).measure(session)


def _select_measures(options: argparse.Namespace) -> list[str]:
    """Return the measures to run, in the order of their table.

    Raises:
        UsageError: an option is given whose only reader `--only` leaves out.
    """
    defaults = [name for name, entry in MEASURES.items() if entry.is_default]
    selected = set(options.only or defaults)
    for name, entry in MEASURES.items():
        value = getattr(options, entry.added_by) if entry.added_by else None
        if not value or name in selected:
            continue
        if options.only:
            if any(entry.added_by in MEASURES[other].reads for other in selected):
                continue
            text = f"--{entry.added_by} is read by the part {name}, which --only leaves out"
            raise UsageError(f"{text}; add {name} to --only, or remove --{entry.added_by}")
        selected.add(name)
    return [name for name in MEASURES if name in selected]


def _make_session(options: argparse.Namespace) -> "Session":
    from kvlab.benchmark.session import Session

    variants = _open_variants(options, resolve_device(options.device))
    block_size = min(variant.model.config.block_size for variant in variants)
    return Session(
        variants,
        _make_settings(options, block_size),
        on_turn=_make_progress_printer(options),
        on_notice=lambda text: print(text, file=sys.stderr, flush=True),
        remeasure_peaks=options.remeasure,
    )


def _open_variants(options: argparse.Namespace, device: str) -> "list[Variant]":
    from kvlab.store import Store
    from kvlab.trial.model_targets import VariantFactory

    factory = VariantFactory(Store(options.store), device)
    has_several_dtypes = len(options.dtype) > 1
    variants = []
    for variant in list_variants(options):
        for dtype in options.dtype:
            name = f"{variant.name} {dtype}" if has_several_dtypes else variant.name
            variants.append(factory.make_variant(variant.target, variant.changes, name, dtype))
    _set_threads(options.threads, factory.cpus)
    names = [variant.name for variant in variants]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise UsageError(f"{repeated} is named twice; name every variant once")
    return variants


def _set_threads(threads: int | None, cpus: dict[str, float]) -> None:
    """Set one number of threads for all variants, so that they are compared alike."""
    number = set_threads(threads, next(iter(cpus.values()), None))
    others = [f"{target} asks for {count:g}" for target, count in cpus.items() if count != number]
    if threads is None and others:
        text = f"measured on {format_count(number, 'thread')}, though {', '.join(others)}"
        print(f"{text}; choose with --threads", file=sys.stderr)


def _make_settings(options: argparse.Namespace, block_size: int) -> "BenchmarkSettings":
    from kvlab.benchmark.session import BenchmarkSettings

    new = options.new_tokens
    longest = block_size - new
    if longest <= 0:
        text = f"--new-tokens {new} leaves no prompt in block_size = {block_size}"
        raise UsageError(f"{text}; use fewer")
    prompt = options.prompt_tokens or min(block_size // 2, longest)
    contexts = options.contexts or sorted({max(1, block_size // 8), prompt, longest})
    for flag, length in [("--prompt-tokens", prompt), *(("--contexts", n) for n in contexts)]:
        if length > longest:
            text = f"{flag} {length} and --new-tokens {new} exceed block_size = {block_size}"
            raise UsageError(f"{text}; shorten one")
    return BenchmarkSettings(
        prompt_tokens=prompt,
        new_tokens=new,
        contexts=tuple(sorted(set(contexts))),
        batches=tuple(sorted(set(options.batches))),
        stop_rule=stop_rule(options),
        text=options.text,
        memory=options.limit,
        conversations=_read_load(options, block_size),
    )


def _read_load(options: argparse.Namespace, block_size: int) -> "ConversationsConfig | None":
    """Return the load of `--load`, else that of the first target; None if there is none.

    Raises:
        UsageError: `--load` is wrong, or does not fit the smallest ``block_size``.
    """
    from pydantic import ValidationError

    from kvlab.spec import load_experiment
    from kvlab.spec.conversations_config import ConversationsConfig
    from kvlab.spec.overrides import parse_override
    from kvlab.spec.validation_errors import list_field_errors

    target = options.target[0]
    if options.load is None:
        is_spec = target.endswith((".yaml", ".yml"))
        return load_experiment(target).benchmark.conversations if is_spec else None
    values = dict(map(parse_override, options.load))
    try:
        load = ConversationsConfig.model_validate(values)
    except ValidationError as error:
        first = list_field_errors(error, ConversationsConfig, values)[0]
        raise UsageError(f"--load: {first.message}") from None
    for field, text in load.find_length_problems(block_size):
        raise UsageError(f"--load: {field} {text}")
    return load


def stop_rule(options: argparse.Namespace) -> StopRule:
    """Return the stop rule that the options ask for."""
    least, most = options.rounds
    if most < least:
        raise UsageError(f"--rounds {least} {most}: the most is below the least; swap them")
    return StopRule(options.relative_error, least, most, options.seconds)


def _make_progress_printer(options: argparse.Namespace) -> Callable[[str], None]:
    if options.json or not sys.stderr.isatty():
        return lambda _note: None
    return show_status_line


def _write_plots(folder: Path, lines: list[Measurement]) -> None:
    from kvlab.fs.atomic_files import write_atomic
    from kvlab.report.benchmark_plots import (
        benchmark_figures,
        reuse_figures,
        roofline_figure,
    )
    from kvlab.report.figures.svg import render_files

    dumped = [line.model_dump() for line in lines]
    figures = [*benchmark_figures(dumped), roofline_figure(dumped, {}), *reuse_figures(dumped, {})]
    for figure in filter(None, figures):
        svg, png = render_files(figure.plot, figure.name)
        for kind, data in (("svg", svg), ("png", png)):
            write_atomic(folder / f"{figure.name}.{kind}", data)
            print(f"wrote {folder / figure.name}.{kind}", file=sys.stderr)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1; write one such as 0.05")
    return value


# Tables


MAX_NOTES = 3
"""Reasons for noise that are printed; all are in the JSON lines."""

FIELD_HEADERS = {
    "context_length": "context", "prompt_tokens": "prompt", "batch_size": "batch",
    "cached": "cache", "against": "size", "budget_bytes": "bytes",
}  # fmt: skip


_SHARES = ("hit_rate", "hit_rate_exact", "flops_saved", "top_changed")
"""Ends of metrics that are printed in percent."""


def format_tables(name: str, lines: Sequence[Measurement]) -> Iterator[str]:
    """Yield the tables of the measure ``name``, then its notes, each once."""
    layouts: tuple[TableLayout, ...] = import_module(MEASURES[name].module).TABLES
    for layout in layouts:
        text = _format_layout(layout, lines)
        if text:
            yield text
    notes = dict.fromkeys(line.note for line in lines if line.noisy and line.note)
    if notes:
        more = f"\n  and {len(notes) - MAX_NOTES} more" if len(notes) > MAX_NOTES else ""
        yield "! noisy, do not quote: " + "\n  ".join(list(notes)[:MAX_NOTES]) + more


def _format_layout(layout: TableLayout, lines: Iterable[Measurement]) -> str:
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for line in lines:
        for name, text in _format_line(line):
            if name in layout.columns:
                keys = tuple(_format_field(getattr(line, field)) for field in layout.keys)
                rows.setdefault((line.variant, *keys), {})[name] = text
    shown = [name for name in layout.columns if any(name in row for row in rows.values())]
    if not shown:
        return ""
    key_headers = [FIELD_HEADERS.get(field, field) for field in layout.keys]
    header = [*key_headers, *(layout.columns[name] for name in shown)]
    body = [
        [*keys, *(row.get(name, "-") for name in shown), variant]
        for (variant, *keys), row in rows.items()
    ]
    return f"{layout.title}\n{format_table([[*header, 'what'], *body], 'r' * len(header))}"


def _format_line(line: Measurement) -> Iterator[tuple[str, str]]:
    name = line.metric
    if line.metric == "tpot" and not line.cached:
        name = "tpot:uncached"
    yield name, _format_value(line)
    for quantile in line.quantiles:
        yield f"{name}:p{quantile.q * 100:.0f}", _format_quantity(quantile.value, line.unit)


def _format_value(line: Measurement) -> str:
    if line.value is None:
        return "never"
    text = _format_quantity(line.value, line.unit)
    if line.metric in ("mbu", "mfu", "efficiency") or line.metric.endswith(_SHARES):
        text = f"{line.value:.1%}"
    elif line.metric.endswith("_ratio") and line.low is not None and line.high is not None:
        text = f"{line.value:.2f} [{line.low:.2f}, {line.high:.2f}] {_format_verdict(line)}"
    elif line.metric == "step_predicted":
        text += f" ({line.verdict})"
    elif line.relative_error is not None:
        text += f" \N{PLUS-MINUS SIGN}{line.relative_error:.0%}"
    return text + ("!" if line.noisy else "")


def _format_verdict(line: Measurement) -> str:
    if line.verdict == "undecided" and line.least_found is not None:
        return f"not told apart (would have found {line.least_found:.0%})"
    return line.verdict or line.note


def _format_quantity(value: float, unit: str) -> str:
    if unit == "s":
        if value < 1:
            return f"{value * 1000:.3g} ms"
        return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    if unit == "bytes":
        return f"{value:,.0f}" if value < 10**7 else format_number(value, "B")
    if unit in ("tokens", "sequences"):
        return f"{value:,.0f}"
    return format_number(value)


def _format_field(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
