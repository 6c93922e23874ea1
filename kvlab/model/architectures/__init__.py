"""The published architectures, by their ``model_type``."""

from kvlab.model.architecture import Architecture
from kvlab.model.architectures.gpt2 import GPT2
from kvlab.model.architectures.llama import Llama
from kvlab.model.architectures.mistral import Mistral

ARCHITECTURES: dict[str, Architecture] = {"gpt2": GPT2(), "llama": Llama(), "mistral": Mistral()}

__all__ = ["ARCHITECTURES"]
