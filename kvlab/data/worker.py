"""A process that makes pieces: one job a line comes in, one answer a line goes out.

Started by `kvlab.data.token_pieces`. It needs no torch, shares nothing with its parent, and ends when
its input does, so it never outlives a parent that was killed by more than one unit.
"""

import json
import os
import signal
import sys
import traceback

from kvlab.data.token_pieces import PieceJob, write_piece
from kvlab.errors import KvlabError


def main() -> None:
    """Answers ``{}``, ``{"refused": text}`` or ``{"broken": traceback}`` until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    for line in sys.stdin:
        answer = {}
        try:
            write_piece(PieceJob(**json.loads(line)))
        except KvlabError as error:
            answer = {"refused": str(error)}
        except Exception:
            answer = {"broken": traceback.format_exc()}
        try:
            print(json.dumps(answer), flush=True)
        except BrokenPipeError:  # killed parents read no answers
            os._exit(1)
