"""`kvlab generate`: continue a text with the model of a trial, a checkpoint or a preset."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from kvlab.cli.shared_arguments import (
    add_device,
    add_json,
    add_store,
    add_threads,
    resolve_device,
    set_threads,
)
from kvlab.errors import UsageError
from kvlab.humanize import format_count
from kvlab.spec import parse_override

EPILOG = """\
examples:
  kvlab generate 3f2a --prompt "The array is"        (a trial, by the first digits of its id)
  kvlab generate path/to/gpt2 --prompt "Call me" --temperature 0.8 --top-p 0.95 --seed 1
  kvlab generate 3f2a --prompt "The" --serving tie=adjacent:2 --serving kv_dtype=int8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("target", help="a trial id, a checkpoint folder or repository, or a preset")
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="may be repeated for a batch"
    )
    parser.add_argument(
        "--prompt-ids", action="append", default=[], metavar="1,2,3",
        help="token ids, for checkpoints with a tokenizer that kvlab does not have",
    )  # fmt: skip
    parser.add_argument("--new-tokens", type=int, default=64, help="default 64")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help="also end a row at this text, which must be exactly one token",
    )  # fmt: skip
    parser.add_argument(
        "--serving", action="append", default=[], metavar="KEY=VALUE",
        help="change how the model is served: kv_dtype=int8, tie=adjacent:2, tie_rule=owner",
    )  # fmt: skip
    parser.add_argument(
        "--uncached", action="store_true", help="generate without a cache, the slow baseline"
    )
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="draw the weights of a preset at random",
    )
    add_device(parser)
    add_threads(parser)
    add_store(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from kvlab.model.generate import Sampling, generate
    from kvlab.store import Store
    from kvlab.trial.model_targets import open_model

    try:
        sampling = Sampling(options.temperature, options.top_k, options.top_p)
    except ValueError as error:
        raise UsageError(str(error)) from None
    opened = open_model(options.target, Store(options.store), random_weights=options.random_weights)
    device = resolve_device(options.device)
    threads = set_threads(options.threads, opened.cpus)
    text_interface = _TextInterface(opened.tokenizer, options)
    serving = _override_serving(opened, options.serving)
    model = opened.model.to(device).eval()
    is_streamed = len(text_interface.prompts) == 1 and not options.json
    on_tokens = text_interface.make_token_printer() if is_streamed else None
    start = time.perf_counter()
    try:
        rows = generate(
            model,
            text_interface.prompts,
            options.new_tokens,
            sampling=sampling,
            stop=text_interface.stop,
            seed=options.seed,
            serving=serving,
            cached=not options.uncached,
            on_tokens=on_tokens,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    seconds = time.perf_counter() - start
    text_interface.print_rows(rows, seconds, streamed=is_streamed)
    if device == "cpu" and not options.json:
        print(f"on {format_count(threads, 'thread')}", file=sys.stderr)
    _warn_beyond_block(text_interface.prompts, rows, opened.model.config.block_size)
    return 0


def _warn_beyond_block(prompts: list[list[int]], rows: list[list[int]], block_size: int) -> None:
    """Warn if a row has become longer than the sequences that the model was trained on."""
    longest = max(len(prompt) + len(row) for prompt, row in zip(prompts, rows, strict=True))
    if longest > block_size:
        text = f"warning: {longest:,} tokens with the prompt, and the model was trained on"
        text = f"{text} sequences of {block_size:,} (block_size); what it wrote after that many is"
        hint = f"keep prompt and --new-tokens within {block_size:,} together"
        print(f"{text} beyond what any measurement of it covers; {hint}", file=sys.stderr)


def _override_serving(opened: Any, changes: list[str]) -> Any:
    """Return the model's serving with ``changes``.

    Raises:
        UsageError: If the changes are invalid, or do not suit the model's layers.
    """
    from pydantic import ValidationError

    from kvlab.spec.experiment import ServedModel
    from kvlab.spec.validation_errors import list_field_errors

    patch = dict(map(parse_override, changes))
    serving = {**opened.serving.model_dump(), **patch}
    data = {"name": opened.name, "model": opened.model.config, "serving": serving}
    try:
        return ServedModel.model_validate(data).serving
    except ValidationError as error:
        _, message, _ = list_field_errors(error, ServedModel, data)[0]
        raise UsageError(f"--serving: {message}") from None


class _TextInterface:
    """Prompts, stop tokens and output as text, or as token ids if the tokenizer is unknown."""

    def __init__(self, name: str | None, options: argparse.Namespace):
        from kvlab.data import load_tokenizer

        self.options = options
        self.tokenizer = load_tokenizer(name) if name else None
        self.prompts = [_parse_token_ids(text) for text in options.prompt_ids]
        if options.prompt and self.tokenizer is None:
            raise UsageError(f"{options.target} has a tokenizer of its own; use --prompt-ids")
        if self.tokenizer is not None:
            self.prompts += [self.tokenizer.encode(text) for text in options.prompt]
        if not self.prompts or not all(self.prompts):
            raise UsageError("a prompt is empty; give --prompt TEXT or --prompt-ids 1,2,3")
        self.stop = {self.tokenizer.end_of_text} if self.tokenizer else set()
        for text in options.stop:
            ids = self.tokenizer.encode(text) if self.tokenizer else _parse_token_ids(text)
            if len(ids) != 1:
                raise UsageError(f"--stop {text!r} is {len(ids)} tokens; give one of exactly one")
            self.stop |= set(ids)
        self._pending: list[int] = []
        self._has_begun = False

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids) if self.tokenizer else ",".join(map(str, ids))

    def make_token_printer(self) -> Callable[[list[int]], None]:
        """Return a callback that prints the tokens of one row as complete characters."""

        def print_tokens(tokens: list[int]) -> None:
            if not self._has_begun:  # not earlier, because the prompt may be refused
                self._has_begun = True
                print(self.decode(self.prompts[0]), end="", flush=True)
            self._pending.append(tokens[0])
            text = self.decode(self._pending)
            if tokens[0] in self.stop or not text.endswith("\N{REPLACEMENT CHARACTER}"):
                print(text if self.tokenizer else f",{text}", end="", flush=True)
                self._pending.clear()

        return print_tokens

    def print_rows(self, rows: list[list[int]], seconds: float, *, streamed: bool) -> None:
        count = sum(map(len, rows))
        if self.options.json:
            facts = [
                {"prompt_ids": p, "new_ids": r, "text": self.decode(r) if self.tokenizer else None}
                for p, r in zip(self.prompts, rows, strict=True)
            ]
            print(json.dumps({"rows": facts, "new_tokens": count, "seconds": seconds}, indent=1))
            return
        if streamed:
            rest = self._pending if self._has_begun else self.prompts[0]
            print(self.decode(rest) if rest else "")
        else:
            for index, (prompt, row) in enumerate(zip(self.prompts, rows, strict=True)):
                print(f"--- {index}\n{self.decode([*prompt, *row])}")
        rate = f"{count} tokens in {seconds:.2f} s, {count / max(seconds, 1e-9):.1f} tokens/s"
        print(rate, file=sys.stderr)


def _parse_token_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{text} is not a list of token ids; write one such as 15496,995")
    return [int(part) for part in parts]
