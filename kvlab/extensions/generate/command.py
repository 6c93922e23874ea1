"""`kvlab generate`: continue a text with the model of a trial, a checkpoint or a preset."""

import argparse
import json
import sys
import time
from pathlib import Path

from kvlab.cli import shared_arguments as shared
from kvlab.errors import DataError, UsageError
from kvlab.humanize import format_count
from kvlab.spec import parse_overrides

EPILOG = """\
examples:
  kvlab generate 3f2a --prompt "The array is"        (a trial, by the first digits of its id)
  kvlab generate path/to/gpt2 --prompt "Call me" --temperature 0.8 --top-p 0.95 --seed 1
  kvlab generate 3f2a --prompt "The" --set serving.kv_dtype=int8
"""


_MAX_PADDING = 1024
"""Ids that a model may have beyond its tokenizer's, for faster products."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="a trial id, a checkpoint folder or repository, or a preset")
    shared.add_list(parser, "--prompt", "TEXT", "may be repeated for a batch")
    shared.add_list(parser, "--prompt-ids", "1,2,3", "token ids, where kvlab has no tokenizer")
    text = "read and write text by this one: a name, or the folder of a checkpoint"
    parser.add_argument("--tokenizer", metavar="NAME", help=text)
    parser.add_argument("--new-tokens", type=int, default=64, help="default 64")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, default=0)
    shared.add_list(parser, "--stop", "TEXT", "also end a row at this text of exactly one token")
    shared.add_list(parser, "--set", "KEY=VALUE", "serve otherwise, as in serving.tie=adjacent:2")
    shared.add_flag(parser, "--uncached", "generate without a cache, the slow baseline")
    shared.add_flag(parser, "--random-weights", "draw the weights of a preset at random")
    shared.add_device(parser)
    shared.add_threads(parser)
    shared.add_record(parser)


def run(options: argparse.Namespace) -> None:
    from kvlab.model.generate import Sampling, generate
    from kvlab.store import Store
    from kvlab.trial.model_targets import open_model, override_serving

    try:
        sampling = Sampling(options.temperature, options.top_k, options.top_p)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if sampling.temperature == 0 and (sampling.top_k or sampling.top_p):
        raise UsageError("--top-k and --top-p draw tokens; add --temperature 1, as 0 is greedy")
    if options.uncached and options.set:
        raise UsageError("--set changes how the cache is stored, and --uncached has none")
    opened = open_model(options.target, Store(options.store), random_weights=options.random_weights)
    device = shared.resolve_device(options.device)
    cpus = opened.experiment.resources.cpus if opened.experiment else None
    threads = shared.set_threads(options.threads, cpus)
    text = TextInterface(opened.tokenizer, options, opened.model.config.vocab_size)
    serving = override_serving(opened, parse_overrides(options.set))
    model = opened.model.to(device).eval()
    is_streamed = len(text.prompts) == 1 and not options.json
    start = time.perf_counter()
    try:
        rows = generate(
            model,
            text.prompts,
            options.new_tokens,
            sampling=sampling,
            stop=text.stop,
            seed=options.seed,
            serving=serving,
            cached=not options.uncached,
            on_tokens=text.print_tokens if is_streamed else None,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    text.print_rows(rows, time.perf_counter() - start, is_streamed=is_streamed)
    if device == "cpu" and not options.json:
        print(f"on {format_count(threads, 'thread')}", file=sys.stderr)
    block_size = opened.model.config.block_size
    longest = max(len(prompt) + len(row) for prompt, row in zip(text.prompts, rows, strict=True))
    if longest > block_size:
        warning = f"{longest:,} tokens with the prompt, and the model was trained on {block_size:,}"
        print(f"warning: {warning}; no measurement covers the text beyond", file=sys.stderr)


class TextInterface:
    """Prompts, stop tokens and output as text, or as token ids if the tokenizer is unknown."""

    def __init__(self, name: str | None, options: argparse.Namespace, vocab_size: int):
        from kvlab.data.tokenizers import load_tokenizer

        self.options = options
        if own := options.tokenizer:
            name = str(Path(own).resolve()) if Path(own).is_dir() else own
        try:
            self.tokenizer = load_tokenizer(name) if name else None
        except DataError as error:
            hint = "" if own else "; --tokenizer names another, and --prompt-ids needs none"
            raise UsageError(f"{error}{hint}") from None
        count = self.tokenizer.vocab_size if own and self.tokenizer else vocab_size
        if not 0 <= vocab_size - count < _MAX_PADDING:
            text = f"--tokenizer = {own} has {count:,} ids, and the model {vocab_size:,}"
            raise UsageError(f"{text}; name the one that it was trained with")
        self.prompts = [parse_token_ids(text) for text in options.prompt_ids]
        if options.prompt and self.tokenizer is None:
            hint = "name one with --tokenizer, or use --prompt-ids"
            raise UsageError(f"{options.target} has no tokenizer.json; {hint}")
        if self.tokenizer is not None:
            self.prompts += map(self.encode, options.prompt)
        if not self.prompts or not all(self.prompts):
            raise UsageError("a prompt is empty; give --prompt TEXT or --prompt-ids 1,2,3")
        self.stop = {self.tokenizer.end_of_text} if self.tokenizer else set()
        for text in options.stop:
            ids = self.encode(text)
            if len(ids) != 1:
                raise UsageError(f"--stop {text!r} is {len(ids)} tokens; give one of exactly one")
            self.stop |= set(ids)
        self._pending: list[int] = []
        self._has_begun = False

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text) if self.tokenizer else parse_token_ids(text)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids) if self.tokenizer else ",".join(map(str, ids))

    def print_tokens(self, tokens: list[int]) -> None:
        """Print the next token of the only row, after its prompt.

        A token that ends within a character is printed with the ones that end it.
        """
        if not self._has_begun:  # not earlier, because the prompt may be refused
            self._has_begun = True
            print(self.decode(self.prompts[0]), end="", flush=True)
        self._pending += tokens
        text, separator = self.decode(self._pending), "" if self.tokenizer else ","
        if tokens[0] in self.stop or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(separator + text, end="", flush=True)
            self._pending.clear()

    def print_rows(self, rows: list[list[int]], seconds: float, *, is_streamed: bool) -> None:
        count = sum(map(len, rows))
        if self.options.json:
            facts = [
                {"prompt_ids": p, "new_ids": r, "text": self.decode(r) if self.tokenizer else None}
                for p, r in zip(self.prompts, rows, strict=True)
            ]
            print(json.dumps({"rows": facts, "new_tokens": count, "seconds": seconds}, indent=1))
            return
        if is_streamed:
            rest = self._pending if self._has_begun else self.prompts[0]
            print(self.decode(rest) if rest else "")
        else:
            for index, (prompt, row) in enumerate(zip(self.prompts, rows, strict=True)):
                print(f"--- {index}\n{self.decode([*prompt, *row])}")
        rate = f"{count} tokens in {seconds:.2f} s, {count / max(seconds, 1e-9):.1f} tokens/s"
        print(rate, file=sys.stderr)


def parse_token_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{text} is not a list of token ids; write one such as 15496,995")
    return [int(part) for part in parts]
