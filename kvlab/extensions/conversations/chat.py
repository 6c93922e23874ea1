"""`kvlab generate --chat`: a conversation on standard input and output."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from types import FrameType
from typing import Any

from kvlab.cli import shared_arguments as shared
from kvlab.errors import UsageError
from kvlab.humanize import format_bytes, format_count

DEFAULT_PREFIX_CACHE = 10**9

CHAT_HELP = """\
Each line goes on with the text, and the model replies. /new begins another text, /undo drops the
last turn. Ctrl-C stops a reply, Ctrl-D ends the chat."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_flag(parser, "--chat", "reply to each line of the input, in one conversation")
    shared.add_flag(parser, "--show-reuse", "in a chat: print reused tokens and latency")
    text = "in a chat: the most bytes of K/V that are kept for later turns (default 1GB)"
    parser.add_argument("--prefix-cache", type=shared.memory_size, metavar="SIZE", help=text)


def check(options: argparse.Namespace) -> None:
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


def run(options: argparse.Namespace, text: Any, model: Any, serving: Any, sampling: Any) -> None:
    Chat(options, text, model, serving, sampling).run()


class Chat:
    """A conversation on standard input and output."""

    def __init__(
        self, options: argparse.Namespace, text: Any, model: Any, serving: Any, sampling: Any
    ):
        from kvlab.extensions.conversations.prefix_cache import PrefixCache
        from kvlab.extensions.conversations.turns import Conversation

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
        new = self._text.encode(line + "\n" if tokenizer else line)
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
