"""The transformer."""

from kvlab.model.gpt import GPT

__all__ = ["GPT"]
