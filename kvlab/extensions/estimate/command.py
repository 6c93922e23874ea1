"""`kvlab estimate`: exact KV bytes, parameters and FLOPs of presets and specs."""

import argparse
from string import Template
from typing import Any

from kvlab.cli import shared_arguments as shared
from kvlab.cli.terminal import format_table, print_result
from kvlab.errors import UsageError
from kvlab.humanize import format_number
from kvlab.layout import KVLayout
from kvlab.layout.roofline_model import decode_flops, prefill_flops
from kvlab.spec import load_served_model
from kvlab.spec.dtypes import DTYPES
from kvlab.spec.experiment import ServedModel
from kvlab.spec.flops import forward_flops, parameter_count
from kvlab.spec.presets import PRESET_NOTES

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
    shared.add_flag(parser, "--json", "print a JSON list with an object per target")


def run(options: argparse.Namespace) -> None:
    facts = []
    for one in shared.list_variants(options):
        served = load_served_model(one.target, one.changes)
        named = served.model_copy(update={"name": one.name})
        facts.append(estimate_serving(named, options))
    print_result(options, facts, (_format_side_by_side if facts[1:] else _format_one)(*facts))


def estimate_serving(served: ServedModel, options: argparse.Namespace) -> dict[str, Any]:
    """Return exact sizes of a model's KV cache and weights at one batch size and context length.

    ``dtype`` is the model's, ``kv_dtype`` the one that K and V are stored in. ``note`` says what a
    preset leaves out of the published model. ``largest_batch`` is None without ``--memory``.
    """
    model, layout = served.model, KVLayout.of(served.model, served.serving)
    batch, dtype, context = options.batch, options.dtype, options.context or model.block_size
    try:
        model.check_positions(context, "use a shorter --context")
    except ValueError as error:
        raise UsageError(f"{served.name}: {error}") from None
    parameters = parameter_count(model)
    weights, largest = parameters * DTYPES[dtype].item_bytes, None
    if options.memory is not None:
        largest = max(0, (options.memory - weights) // layout.stored_bytes(1, context, dtype))
    return {
        "name": served.name,
        "dtype": dtype,
        "kv_dtype": layout.storage_dtype(dtype),
        "batch_size": batch,
        "context_length": context,
        "layers": model.n_layer,
        "slots": len(layout.slots),
        "kv_bytes": layout.stored_bytes(batch, context, dtype),
        "kv_bytes_per_token": layout.bytes_per_token(dtype),
        "kv_bytes_per_token_at_limit": layout.bytes_per_token_at_limit(dtype),
        "kv_bytes_read_per_token": layout.read_bytes(batch, context, dtype),
        "kv_bytes_written_per_token": layout.written_bytes(batch, dtype),
        "formula": layout.formula(batch, context, dtype),
        "parameters": parameters,
        "weight_bytes": weights,
        "forward_flops": forward_flops(model, context),
        "prefill_flops": prefill_flops(model, context, layout),
        "decode_flops": decode_flops(model, context, layout),
        "largest_batch": largest,
        "note": PRESET_NOTES.get(served.name.partition(" ")[0], ""),
    }


_ONE = Template("""\
$name: $parameters parameters, $slots K/V slots for $layers layers
KV cache at batch $batch_size, context $context_length, $kv_dtype: $exact_kv_bytes
  = $formula
a token adds        $kv_bytes_per_token bytes while in every window, $kv_bytes_per_token_at_limit \
in the long run
a decoded token reads $kv_bytes_read_per_token bytes of K/V and writes $kv_bytes_written_per_token
weights in $dtype: $exact_weight_bytes
forward pass over the context: $forward_flops FLOPs; as a prompt: $prefill_flops; a decoded token: \
$decode_flops""")


def _format_one(item: dict[str, Any]) -> str:
    fields = {key: f"{one:,}" if isinstance(one, int) else one for key, one in item.items()}
    fields |= {key: f"{one:.4g}" for key, one in item.items() if key.endswith("_flops")}
    fields |= {f"exact_{k}": _format_exact_bytes(item[k]) for k in ("kv_bytes", "weight_bytes")}
    lines = [_ONE.substitute(fields)]
    if item["note"]:
        lines.append(f"note: {item['note']}")
    if item["largest_batch"] is not None:
        lines.append(f"largest batch beside the weights: {item['largest_batch']:,}")
    return "\n".join(lines)


def _format_side_by_side(*items: dict[str, Any]) -> str:
    first = items[0]
    rows = [["slots", "KV bytes", "MB", "MiB", "of first", "read/token", "parameters"]]
    for item in items:
        rows.append([
            f"{item['slots']}/{item['layers']}",
            f"{item['kv_bytes']:,}",
            _format_decimal(item["kv_bytes"] / 10**6),
            _format_decimal(item["kv_bytes"] / 2**20),
            f"1/{first['kv_bytes'] / item['kv_bytes']:.3g}",
            f"{item['kv_bytes_read_per_token']:,}",
            format_number(item["parameters"]),
        ])  # fmt: skip
    if first["largest_batch"] is not None:
        batches = ["largest batch", *(f"{item['largest_batch']:,}" for item in items)]
        rows = [[*row, batch] for row, batch in zip(rows, batches, strict=True)]
    names = ["what", *(item["name"] for item in items)]
    rows = [[*row, name] for row, name in zip(rows, names, strict=True)]
    contexts = {item["context_length"] for item in items}
    context = "each at its block size" if len(contexts) > 1 else f"context {contexts.pop():,}"
    head = f"batch {first['batch_size']}, {context}, model in {first['dtype']}"
    notes = {f"{one['name'].partition(' ')[0]}: {one['note']}" for one in items if one["note"]}
    return "\n".join([head, format_table(rows, "r" * (len(rows[0]) - 1)), *sorted(notes)])


def _format_exact_bytes(count: int) -> str:
    """Return a size in bytes, MB (10^6) and MiB (2^20), because articles mix the two units."""
    megabytes, mebibytes = _format_decimal(count / 10**6), _format_decimal(count / 2**20)
    return f"{count:,} bytes = {megabytes} MB = {mebibytes} MiB"


def _format_decimal(value: float) -> str:
    """Return one decimal, or three below 10: 1,048,576 bytes are 1.049 MB, not 1.0 MB."""
    return f"{value:,.3f}" if value < 10 else f"{value:,.1f}"
