"""`kvlab export`: write the model of a trial as a Hugging Face folder."""

import argparse
from pathlib import Path

from kvlab.cli.shared_arguments import add_record
from kvlab.cli.terminal import print_result
from kvlab.errors import UsageError

EPILOG = """\
The model must have an architecture of transformers: gpt2 (learned positions, full heads), llama,
mistral, smollm3, qwen3, gemma3_text or deepseek_v2 (rope, rmsnorm, a gated MLP). Others are refused
with the reason. The tokenizer is not written, because other programs have their own files of
GPT-2's ranks. config.json has the id of the end of text.

examples:
  kvlab export 3f2a weights/mine          (a trial, by the first digits of its id)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trial", metavar="TRIAL", help="a trial's id, or its first digits")
    parser.add_argument("folder", metavar="FOLDER", help="folder to write, new or empty")
    add_record(parser)


def run(options: argparse.Namespace) -> None:
    from kvlab.data.tokenizers import load_tokenizer
    from kvlab.store import Store
    from kvlab.trial.model_targets import open_trial

    folder = Path(options.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there and not empty; name a new folder")
    opened = open_trial(options.trial, Store(options.store))
    assert opened.tokenizer is not None, "a trial has a tokenizer"
    end_of_text = load_tokenizer(opened.tokenizer).end_of_text
    kind = opened.model.save_pretrained(folder, end_of_text=end_of_text)
    facts = {"trial": opened.name, "model_type": kind, "folder": str(folder)}
    print_result(options, facts, f"{folder}: trial {opened.name} as {kind}")
