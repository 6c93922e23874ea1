"""`kvlab generate`: continue a text with the model of a trial, a checkpoint or a preset."""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from types import FrameType
from typing import Any

from kvlab.cli import shared_arguments as shared
from kvlab.errors import UsageError
from kvlab.humanize import format_bytes, format_count
from kvlab.spec import parse_override

EPILOG = """\
examples:
  kvlab generate 3f2a --prompt "The array is"        (a trial, by the first digits of its id)
  kvlab generate path/to/gpt2 --prompt "Call me" --temperature 0.8 --top-p 0.95 --seed 1
  kvlab generate 3f2a --prompt "The" --set serving.kv_dtype=int8
  kvlab generate 3f2a --chat --show-reuse            (a conversation, with what turns take over)
"""

DEFAULT_PREFIX_CACHE = 10**9

CHAT_HELP = """\
Each line goes on with the text, and the model replies. /new begins another text, /undo drops the
last turn. Ctrl-C stops a reply, Ctrl-D ends the chat."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="a trial id, a checkpoint folder or repository, or a preset")
    shared.add_list(parser, "--prompt", "TEXT", "may be repeated for a batch")
    shared.add_list(parser, "--prompt-ids", "1,2,3", "token ids, where kvlab has no tokenizer")
    parser.add_argument("--new-tokens", type=int, default=64, help="default 64")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, default=0)
    shared.add_list(parser, "--stop", "TEXT", "also end a row at this text of exactly one token")
    shared.add_list(parser, "--set", "KEY=VALUE", "serve otherwise, as in serving.tie=adjacent:2")
    shared.add_flag(parser, "--uncached", "generate without a cache, the slow baseline")
    shared.add_flag(parser, "--random-weights", "draw the weights of a preset at random")
    shared.add_flag(parser, "--chat", "reply to each line of the input, in one conversation")
    shared.add_flag(parser, "--show-reuse", "in a chat: print reused tokens and latency")
    text = "in a chat: the most bytes of K/V that are kept for later turns (default 1GB)"
    parser.add_argument("--prefix-cache", type=shared.memory_size, metavar="SIZE", help=text)
    shared.add_device(parser)
    shared.add_threads(parser)
    shared.add_record(parser)


def run(options: argparse.Namespace) -> None:
    from kvlab.model.generate import Sampling, generate
    from kvlab.store import Store
    from kvlab.trial.model_targets import open_model, override_serving

    _check_chat(options)
    try:
        sampling = Sampling(options.temperature, options.top_k, options.top_p)
    except ValueError as error:
        raise UsageError(str(error)) from None
    opened = open_model(options.target, Store(options.store), random_weights=options.random_weights)
    device = shared.resolve_device(options.device)
    cpus = opened.experiment.resources.cpus if opened.experiment else None
    threads = shared.set_threads(options.threads, cpus)
    text = _TextInterface(opened.tokenizer, options)
    serving = override_serving(opened, dict(map(parse_override, options.set)))
    model = opened.model.to(device).eval()
    if options.chat:
        _Chat(options, text, model, serving, sampling).run()
        return
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


def _check_chat(options: argparse.Namespace) -> None:
    if not options.chat:
        if options.show_reuse or options.prefix_cache is not None:
            text = "--show-reuse and --prefix-cache are about conversations"
            raise UsageError(f"{text}; add --chat, or leave them out")
    elif options.json or options.uncached:
        raise UsageError("--json and --uncached do not go with --chat; leave them out")
    elif len(options.prompt) + len(options.prompt_ids) > 1:
        raise UsageError("a chat begins with one prompt at most; give --prompt once")
    elif options.new_tokens < 1:
        raise UsageError(f"--new-tokens {options.new_tokens} is no reply; use 1 or more")


class _TextInterface:
    """Prompts, stop tokens and output as text, or as token ids if the tokenizer is unknown."""

    def __init__(self, name: str | None, options: argparse.Namespace):
        from kvlab.data.tokenizers import load_tokenizer

        self.options = options
        self.tokenizer = load_tokenizer(name) if name else None
        self.prompts = [_parse_token_ids(text) for text in options.prompt_ids]
        if options.prompt and self.tokenizer is None:
            raise UsageError(f"{options.target} has a tokenizer of its own; use --prompt-ids")
        if self.tokenizer is not None:
            self.prompts += [self.tokenizer.encode(text) for text in options.prompt]
        if not all(self.prompts) or not (self.prompts or options.chat):
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

    def print_tokens(self, tokens: list[int]) -> None:
        """Print the next token of the only row, after its prompt."""
        if not self._has_begun:  # not earlier, because the prompt may be refused
            self._has_begun = True
            print(self.decode(self.prompts[0]), end="", flush=True)
        self.print_token(tokens[0], "" if self.tokenizer else ",")

    def print_token(self, token: int, separator: str = "") -> None:
        """Print a token, unless it ends within a character: then with the ones that end it."""
        self._pending.append(token)
        text = self.decode(self._pending)
        if token in self.stop or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(separator + text, end="", flush=True)
            self._pending.clear()

    def end_line(self) -> None:
        """Print what is left of a last character, and end the line."""
        print(self.decode(self._pending) if self._pending else "", flush=True)
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


class _Chat:
    """A conversation on standard input and output."""

    def __init__(
        self, options: argparse.Namespace, text: _TextInterface, model: Any, serving: Any,
        sampling: Any,
    ):  # fmt: skip
        from kvlab.cache import PrefixCache
        from kvlab.model.turns import Conversation

        self._options, self._text = options, text
        budget = options.prefix_cache
        self._prefix_cache = PrefixCache(DEFAULT_PREFIX_CACHE if budget is None else budget)
        start = text.prompts[0] if text.prompts else []
        self._begin = partial(
            Conversation, model, self._prefix_cache, start, weights="", serving=serving,
            sampling=sampling, seed=options.seed,
        )  # fmt: skip
        self._conversation = self._begin()
        self._turn_starts: list[int] = []

    def run(self) -> None:
        """Reply to lines until the input ends."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            print(CHAT_HELP, file=sys.stderr)
        line = None
        while line != "":
            if is_terminal:
                print("> ", end="", flush=True)
            try:
                line = sys.stdin.readline()
                if line:
                    self._take_line(line.rstrip("\n"))
            except KeyboardInterrupt:
                print("\nCtrl-D ends the chat", file=sys.stderr)
            except ValueError as error:
                print(error, file=sys.stderr)
        if is_terminal:
            print()  # after the prompt

    def _take_line(self, line: str) -> None:
        if line == "/new":
            self._conversation, self._turn_starts = self._begin(), []
        elif line == "/undo":
            if not self._turn_starts:
                raise ValueError("there is no turn to drop")
            del self._conversation.tokens[self._turn_starts.pop() :]
        elif line.startswith("/"):
            raise ValueError(f"{line.split()[0]} is no command; use /new or /undo")
        else:
            self._reply(line)

    def _reply(self, line: str) -> None:
        tokenizer, before = self._text.tokenizer, len(self._conversation.tokens)
        new = tokenizer.encode(line + "\n") if tokenizer else _parse_token_ids(line)
        reply = self._conversation.reply(new, self._options.new_tokens, self._text.stop)
        separator = ""
        try:
            with _count_interrupts() as interrupts, closing(reply):
                for token in reply:
                    self._text.print_token(token, separator)
                    separator = "" if tokenizer else ","
                    if interrupts:
                        break
        except KeyboardInterrupt:
            self._text.end_line()
            raise ValueError("the turn was dropped") from None
        self._text.end_line()
        self._turn_starts.append(before)
        reuse = self._conversation.reuse
        if self._options.show_reuse and reuse is not None:
            held, budget = self._prefix_cache.bytes_held, self._prefix_cache.bytes_budget
            print(
                f"[took over {reuse.hit_tokens:,} of {format_count(reuse.prompt_tokens, 'token')}"
                f" ({format_bytes(reuse.hit_bytes)}); first token after"
                f" {1000 * reuse.first_token_seconds:.3g} ms;"
                f" {format_bytes(held)} of {format_bytes(budget)} held]",
                file=sys.stderr,
            )


@contextmanager
def _count_interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C in a list instead of raising it; a second one is raised.

    So a reply ends between two tokens, and not within one, whose K/V would be stored in part.
    """
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        if len(interrupts) > 1:
            signal.default_int_handler(number, frame)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)


def _parse_token_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{text} is not a list of token ids; write one such as 15496,995")
    return [int(part) for part in parts]
