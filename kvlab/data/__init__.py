"""Text, tokens, batches and evaluation sets. numpy only; no torch."""

from kvlab.data.batches import training_batch, validation_batches
from kvlab.data.folder import Progress, data_folder
from kvlab.data.hellaswag_set import HellaSwagItem, get_hellaswag, hellaswag
from kvlab.data.preparation import prepare, prepared
from kvlab.data.shards import Dataset, open_dataset, verify_dataset
from kvlab.data.text_identity import identity
from kvlab.data.tokenizers import Tokenizer, tokenizer

__all__ = [
    "Dataset",
    "HellaSwagItem",
    "Progress",
    "Tokenizer",
    "data_folder",
    "get_hellaswag",
    "hellaswag",
    "identity",
    "open_dataset",
    "prepare",
    "prepared",
    "tokenizer",
    "training_batch",
    "validation_batches",
    "verify_dataset",
]
