"""`kvlab estimate`: exact KV bytes, parameters and FLOPs of presets and specs."""

import argparse
from dataclasses import asdict
from typing import Any

from kvlab.cli import shared_arguments as shared
from kvlab.cli.terminal import format_decimal, format_exact_bytes, format_table, print_result
from kvlab.extensions.estimate import serving_estimate
from kvlab.extensions.estimate.serving_estimate import ServingEstimate, estimate_serving
from kvlab.humanize import format_number
from kvlab.layout import KVLayout
from kvlab.spec import load_served_model
from kvlab.spec.dtypes import DTYPES
from kvlab.spec.experiment import ServedModel

CONTEXTS = (1024, 8192, 65_536)
BATCHES = (1, 8, 64)

EPILOG = """\
examples:
  kvlab estimate gpt2 --context 1024
  kvlab estimate gpt2 --set model.n_kv_head=1 --compare serving.tie=character-ai
  kvlab estimate gpt3-175b llama-7b --dtype float16 --memory 80GB
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="+", help="a preset such as gpt2, or an experiment file")
    shared.add_variants(parser)
    text = "sequences in a batch (default 1)"
    parser.add_argument("--batch", type=shared.positive_int, default=1, help=text)
    text = "tokens of each sequence (default the model's block size)"
    parser.add_argument("--context", type=shared.positive_int, help=text)
    names = sorted(name for name, dtype in DTYPES.items() if not dtype.is_quantized)
    parser.add_argument("--dtype", default="float32", choices=names, help="default float32")
    shared.add_memory(parser, "prints the largest batch that fits")
    shared.add_flag(parser, "--sizes", "also other contexts, batches and sizes of model")
    shared.add_flag(parser, "--json", "print a JSON list with an object per target")


def run(options: argparse.Namespace) -> None:
    dtype, estimates, facts, tables = options.dtype, [], [], []
    for one in shared.list_variants(options):
        shape = load_served_model(one.target, one.changes).model_copy(update={"name": one.name})
        estimate = estimate_serving(
            shape,
            batch_size=options.batch,
            context_length=options.context,
            dtype=dtype,
            memory=options.memory,
        )
        estimates.append(estimate)
        facts.append(asdict(estimate))
        if options.sizes:
            facts[-1]["sizes"] = sizes = _estimate_sizes(shape, dtype)
            tables.append(f"\n{shape.name}: KV bytes of this layout elsewhere, model in {dtype}")
            rows = [["size", "context", *(f"batch {count}" for count in BATCHES)]]
            for size in sizes:
                counts = [f"{count:,}" for count in size.get("kv_bytes", {}).values()]
                context = f"{size['context_length']:,}" if counts else "-"
                reason = [size.get("reason"), *[""] * (len(BATCHES) - 1)]
                rows.append([size["size"], context, *(counts or reason)])
            tables.append(format_table(rows, " r" + "r" * len(BATCHES)))
    text = _format_one(estimates[0]) if len(estimates) == 1 else _format_side_by_side(estimates)
    print_result(options, facts, "\n".join([text, *tables]))


def _estimate_sizes(shape: ServedModel, dtype: str) -> list[dict[str, Any]]:
    """Return KV bytes of a layout at other sizes, contexts and batches, or why it does not fit."""
    rows: list[dict[str, Any]] = []
    for size in dict.fromkeys((shape.name, *serving_estimate.RESCALE_PRESETS)):
        try:
            other = shape if size == shape.name else serving_estimate.rescale(shape, size)
            layout = KVLayout.of(other.model, other.serving)
        except serving_estimate.RescaleError as error:
            rows.append({"size": size, "reason": str(error)})
            continue
        rows += [
            {
                "size": size,
                "context_length": context,
                "kv_bytes": {str(n): layout.stored_bytes(n, context, dtype) for n in BATCHES},
            }
            for context in CONTEXTS
        ]
    return rows


def _format_one(item: ServingEstimate) -> str:
    lines = [
        f"{item.name}: {item.parameters:,} parameters,"
        f" {item.slots} K/V slots for {item.layers} layers",
        f"KV cache at batch {item.batch_size}, context {item.context_length:,},"
        f" {item.kv_dtype}: {format_exact_bytes(item.kv_bytes)}",
        f"  = {item.formula}",
        f"a token adds        {item.kv_bytes_per_token:,} bytes while in every window,"
        f" {item.kv_bytes_per_token_at_limit:,} in the long run",
        f"a decoded token reads {item.kv_bytes_read_per_token:,} bytes of K/V"
        f" and writes {item.kv_bytes_written_per_token:,}",
        f"weights in {item.dtype}: {format_exact_bytes(item.weight_bytes)}",
        f"forward pass over the context: {item.forward_flops:.4g} FLOPs;"
        f" as a prompt: {item.prefill_flops:.4g}; a decoded token: {item.decode_flops:.4g}",
    ]
    if item.note:
        lines.append(f"note: {item.note}")
    if item.largest_batch is not None:
        lines.append(f"largest batch beside the weights: {item.largest_batch:,}")
    return "\n".join(lines)


def _format_side_by_side(items: list[ServingEstimate]) -> str:
    head = ["slots", "KV bytes", "MB", "MiB", "of first", "read/token", "parameters"]
    memory = items[0].largest_batch is not None
    rows = [[*head, *(["largest batch"] if memory else []), "what"]]
    for item in items:
        row = [
            f"{item.slots}/{item.layers}",
            f"{item.kv_bytes:,}",
            format_decimal(item.kv_bytes / 10**6),
            format_decimal(item.kv_bytes / 2**20),
            f"1/{items[0].kv_bytes / item.kv_bytes:.3g}",
            f"{item.kv_bytes_read_per_token:,}",
            format_number(item.parameters),
        ]
        rows.append([*row, *([f"{item.largest_batch:,}"] if memory else []), item.name])
    contexts = sorted({item.context_length for item in items})
    context = f"context {contexts[0]:,}" if len(contexts) == 1 else "each at its block size"
    head_line = f"batch {items[0].batch_size}, {context}, model in {items[0].dtype}"
    notes = {f"{item.name.partition(' ')[0]}: {item.note}" for item in items if item.note}
    return "\n".join([head_line, format_table(rows, "r" * (len(rows[0]) - 1)), *sorted(notes)])
