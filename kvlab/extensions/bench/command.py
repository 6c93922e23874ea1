"""`kvlab bench`: measure what a KV cache costs and saves, as tables.

Imports torch only when it runs.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kvlab.benchmark.measurement import Measurement, StopRule, TableLayout
from kvlab.cli import shared_arguments as shared
from kvlab.cli.terminal import format_table, show_status_line
from kvlab.errors import UsageError
from kvlab.humanize import format_bytes, format_count, format_number
from kvlab.spec import load_experiment, parse_overrides
from kvlab.spec.benchmark_config import MEASURES
from kvlab.spec.validation_errors import list_field_errors

if TYPE_CHECKING:
    from kvlab.benchmark.session import BenchmarkSettings, Variant


DTYPES = ("float32", "bfloat16", "float16")

DEFAULTS = StopRule()

_PARTS = "\n".join(f"  {name:11} {entry.summary}" for name, entry in MEASURES.items())

_EXAMPLES = "\n".join(f"  kvlab {entry.example}" for entry in MEASURES.values() if entry.example)

EPILOG = f"""\
parts:
{_PARTS}

examples:
  kvlab bench gpt2 --compare model.n_kv_head=1 --contexts 128 512 960
  kvlab bench experiments/quickstart.yaml 3f2a --only latency throughput --batches 1 8
{_EXAMPLES}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a preset, a spec file (both with random weights), a trial id, or a checkpoint"
    parser.add_argument("target", nargs="+", help=text)
    shared.add_variants(parser)
    defaults = " ".join(name for name, entry in MEASURES.items() if entry.is_default)
    added = ", ".join(name for name, entry in MEASURES.items() if entry.added_by)
    text = f"parts to measure (default: {defaults}; and {added} with their options)"
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), metavar="PART", help=text)
    text = (
        f"dtype of the weights: {', '.join(DTYPES)}; several are variants (default: float32;"
        " of an experiment or a trial on a GPU, the precision of its training)"
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=[None], metavar="DTYPE", help=text
    )
    shared.add_device(parser)
    shared.add_threads(parser)
    number = shared.positive_int
    text = "default half the smallest block size"
    parser.add_argument("--prompt-tokens", type=number, help=text)
    parser.add_argument("--new-tokens", type=number, default=16, help="default 16")
    text = "prompt lengths of latency (default: an eighth, half, and all of the block size)"
    parser.add_argument("--contexts", type=number, nargs="+", metavar="N", help=text)
    parser.add_argument("--batches", type=number, nargs="+", default=[1, 4], metavar="N")
    error, rounds = DEFAULTS.relative_error, [DEFAULTS.min_rounds, DEFAULTS.max_rounds]
    text = f"of every median, at which it is measured well enough (default {error})"
    parser.add_argument("--relative-error", type=_fraction, default=error, metavar="X", help=text)
    parser.add_argument(
        "--rounds", type=number, nargs=2, metavar=("LEAST", "MOST"), default=rounds,
        help=f"turns of every variant (default {DEFAULTS.min_rounds} {DEFAULTS.max_rounds})",
    )  # fmt: skip
    text = f"start no round of a context or batch later (default {DEFAULTS.seconds:.0f})"
    parser.add_argument("--seconds", type=number, default=DEFAULTS.seconds, help=text)
    parser.add_argument("--text", type=Path, help="Moby Dick as plain text, for the part task")
    for name, entry in MEASURES.items():
        if entry.options is not None:
            text = f"keys of benchmark.{name}, for the part {name} (the others: the target's)"
            parser.add_argument(f"--{entry.added_by}", nargs="+", metavar="KEY=VALUE", help=text)
        elif entry.memory_key:
            text, size = f"bytes that the part {name} may use", shared.memory_size
            parser.add_argument(f"--{entry.added_by}", type=size, metavar="SIZE", help=text)
    shared.add_flag(parser, "--remeasure", "measure the device's peaks again")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the curves, SVG and PNG")
    shared.add_flag(parser, "--json", "one JSON line per measurement")
    shared.add_store(parser)


def run(options: argparse.Namespace) -> int:
    from kvlab.benchmark.session import Session
    from kvlab.extensions.bench.variants import check_caches_fit, explain_out_of_memory

    if options.plots and options.plots.exists() and not options.plots.is_dir():
        raise UsageError(f"--plots {options.plots} is no folder; name another")
    names = _select_measures(options)
    variants = _open_variants(options, shared.resolve_device(options.device))
    is_quiet = options.json or not sys.stderr.isatty()
    block_size = min(one.model.config.block_size for one in variants)
    session = Session(
        variants,
        _make_settings(options, names, block_size),
        on_turn=(lambda _note: None) if is_quiet else show_status_line,
        on_notice=lambda text: print(text, file=sys.stderr, flush=True),
        remeasure_peaks=options.remeasure,
    )
    if any(MEASURES[name].per_batch for name in names):
        check_caches_fit(session)
    lines: list[Measurement] = []
    for name in names:
        session.activity, measured = name, []
        with explain_out_of_memory(session):
            for line in import_module(MEASURES[name].module).measure(session):
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


def _select_measures(options: argparse.Namespace) -> list[str]:
    """Return the measures to run, in the order of their table.

    Raises:
        UsageError: an option is given whose only reader `--only` leaves out.
    """
    selected = set(options.only or (name for name, one in MEASURES.items() if one.is_default))
    for name, entry in MEASURES.items():
        flag = entry.added_by
        if name in selected or not flag or getattr(options, flag) is None:
            continue
        if not options.only:
            selected.add(name)
        elif not any(flag in MEASURES[other].reads for other in selected):
            text = f"--{flag} is read by the part {name}, which --only leaves out"
            raise UsageError(f"{text}; add {name} to --only, or remove --{flag}")
    return [name for name in MEASURES if name in selected]


def _open_variants(options: argparse.Namespace, device: str) -> "list[Variant]":
    from kvlab.extensions.bench.variants import VariantFactory
    from kvlab.store import Store

    factory = VariantFactory(Store(options.store), device)
    variants: dict[str, Variant] = {}
    for one in shared.list_variants(options):
        for dtype in options.dtype:
            name = f"{one.name} {dtype}" if len(options.dtype) > 1 else one.name
            if name in variants:
                raise UsageError(f"{name} is named twice; name every variant once")
            variants[name] = factory.make_variant(one.target, one.changes, name, dtype)
    number = shared.set_threads(options.threads, next(iter(factory.cpus.values()), None))
    others = [f"{target} asks for {n:g}" for target, n in factory.cpus.items() if n != number]
    if options.threads is None and others:
        text = f"measured on {format_count(number, 'thread')}, though {', '.join(others)}"
        print(f"{text}; choose with --threads", file=sys.stderr)
    return list(variants.values())


def _make_settings(
    options: argparse.Namespace, names: list[str], block_size: int
) -> "BenchmarkSettings":
    from kvlab.benchmark.session import BenchmarkSettings

    new = options.new_tokens
    longest = block_size - new
    if longest <= 0:
        text = f"--new-tokens {new} leaves no prompt in block_size = {block_size}"
        raise UsageError(f"{text}; use fewer")
    prompt = options.prompt_tokens or min(block_size // 2, longest)
    contexts = options.contexts or {max(1, block_size // 8), prompt, longest}
    for flag, length in [("--prompt-tokens", prompt), *(("--contexts", n) for n in contexts)]:
        if length > longest:
            text = f"{flag} {length} and --new-tokens {new} exceed block_size = {block_size}"
            raise UsageError(f"{text}; shorten one")
    least, most = options.rounds
    if most < least:
        raise UsageError(f"--rounds {least} {most}: the most is below the least; swap them")
    return BenchmarkSettings(
        prompt_tokens=prompt,
        new_tokens=new,
        contexts=tuple(sorted(set(contexts))),
        batches=tuple(sorted(set(options.batches))),
        stop_rule=StopRule(options.relative_error, least, most, options.seconds),
        text=options.text,
        options=_read_measure_options(options, names, block_size),
    )


def _read_measure_options(
    options: argparse.Namespace, names: list[str], block_size: int
) -> dict[str, Any]:
    """Return what measures get by name: what is given, else keys of the first target.

    Raises:
        UsageError: they are wrong, or those of ``names`` do not fit the smallest ``block_size``.
    """
    found: dict[str, Any] = {}
    if (target := options.target[0]).endswith((".yaml", ".yml")):
        found |= load_experiment(target).benchmark.list_options()
    for name, entry in MEASURES.items():
        given = getattr(options, entry.added_by or "", None)
        origin = f"--{entry.added_by}" if given else f"{target}: benchmark.{name}"
        if entry.options is None or given is None:
            found[name] = found.get(name, given)
        else:
            own = found[name].model_dump(exclude_unset=True) if found.get(name) else {}
            values = own | parse_overrides(given)
            try:
                found[name] = entry.options.model_validate(values)
            except ValidationError as error:
                first = list_field_errors(error, entry.options, values)[0]
                raise UsageError(f"{origin}: {first.message}") from None
        if entry.options is not None and name in names and found[name] is not None:
            for field, text in found[name].find_length_problems(block_size):
                raise UsageError(f"{origin}: {field} {text}")
    return found


def _write_plots(folder: Path, lines: list[Measurement]) -> None:
    from kvlab.fs.atomic_files import write_atomic
    from kvlab.report.benchmark_plots import benchmark_figures, roofline_figure
    from kvlab.report.figures import render_files

    dumped = [line.model_dump() for line in lines]
    figures = [*benchmark_figures(dumped), roofline_figure(dumped, {})]
    for place in filter(None, (entry.figures for entry in MEASURES.values())):
        figures += resolve_name(place)(dumped, {})
    for figure in filter(None, figures):
        files = render_files(figure.plot, figure.name)
        for kind, data in zip(("svg", "png"), files, strict=True):
            write_atomic(folder / f"{figure.name}.{kind}", data)
            print(f"wrote {folder / figure.name}.{kind}", file=sys.stderr)


def _fraction(text: str) -> float:
    if not 0 < shared.parse_number(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1; write one such as 0.05")
    return float(text)


# Tables


MAX_NOTES = 3
"""Reasons for noise that are printed; all are in the JSON lines."""


def format_tables(name: str, lines: Sequence[Measurement]) -> Iterator[str]:
    """Yield the tables of the measure ``name``, then its notes, each once."""
    layouts: tuple[TableLayout, ...] = import_module(MEASURES[name].module).TABLES
    yield from filter(None, (_format_layout(layout, lines) for layout in layouts))
    notes = dict.fromkeys(line.note for line in lines if line.noisy and line.note)
    if notes:
        more = f"\n  and {len(notes) - MAX_NOTES} more" if len(notes) > MAX_NOTES else ""
        yield "! noisy, do not quote: " + "\n  ".join(list(notes)[:MAX_NOTES]) + more


def _format_layout(layout: TableLayout, lines: Iterable[Measurement]) -> str:
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for line in lines:
        metric = "tpot:uncached" if line.metric == "tpot" and not line.cached else line.metric
        texts = {metric: _format_value(line, layout)}
        for quantile in line.quantiles:
            texts[f"{metric}:p{quantile.q * 100:.0f}"] = _format_quantity(quantile.value, line.unit)
        for name in texts.keys() & layout.columns.keys():
            keys = tuple(_format_field(getattr(line, field)) for field in layout.keys)
            rows.setdefault((line.variant, *keys), {})[name] = texts[name]
    shown = [name for name in layout.columns if any(name in row for row in rows.values())]
    if not shown:
        return ""
    header = [*layout.keys.values(), *(layout.columns[name] for name in shown)]
    body = [
        [*keys, *(row.get(name, "-") for name in shown), variant]
        for (variant, *keys), row in rows.items()
    ]
    return f"{layout.title}\n{format_table([[*header, 'what'], *body], 'r' * len(header))}"


def _format_value(line: Measurement, layout: TableLayout) -> str:
    if line.value is None:
        return "never"
    text = _format_quantity(line.value, line.unit)
    if line.metric in layout.shares:
        text = f"{line.value:.1%}"
    elif line.metric.endswith("_ratio") and line.low is not None:
        verdict = line.verdict or line.note
        if line.verdict == "undecided" and line.least_found is not None:
            verdict = f"not told apart (would have found {line.least_found:.0%})"
        text = f"{line.value:.2f} [{line.low:.2f}, {line.high:.2f}] {verdict}"
    elif line.metric == "step_predicted":
        text += f" ({line.verdict})"
    elif line.relative_error is not None:
        text += f" \N{PLUS-MINUS SIGN}{line.relative_error:.0%}"
    return text + ("!" if line.noisy else "")


def _format_quantity(value: float, unit: str) -> str:
    if unit == "s":
        if value < 1:
            return f"{value * 1000:.3g} ms"
        return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    if unit == "bytes":
        return format_bytes(value)
    if unit in ("tokens", "sequences"):
        return f"{value:,.0f}"
    return format_number(value)


def _format_field(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
