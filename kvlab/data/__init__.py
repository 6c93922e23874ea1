"""Text, tokens, batches and evaluation sets, with numpy and without torch."""

from kvlab.data.batches import (
    ScoredText,
    get_training_batch,
    spread_documents,
    spread_indices,
    spread_windows,
)
from kvlab.data.bigram_table import score_tables
from kvlab.data.data_dir import get_data_dir
from kvlab.data.dataset_preparation import (
    dataset_folder,
    dataset_identity,
    find_dataset,
    is_small_text,
    list_prepared_datasets,
    prepare_dataset,
    set_aside_dataset,
)
from kvlab.data.hellaswag_dataset import HellaSwagItem, get_hellaswag_file, load_hellaswag
from kvlab.data.shards import Dataset, DatasetFacts, open_dataset, verify_dataset
from kvlab.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "Dataset",
    "DatasetFacts",
    "HellaSwagItem",
    "ScoredText",
    "Tokenizer",
    "dataset_folder",
    "dataset_identity",
    "find_dataset",
    "get_data_dir",
    "get_hellaswag_file",
    "get_training_batch",
    "is_small_text",
    "list_prepared_datasets",
    "load_hellaswag",
    "load_tokenizer",
    "open_dataset",
    "prepare_dataset",
    "score_tables",
    "set_aside_dataset",
    "spread_documents",
    "spread_indices",
    "spread_windows",
    "verify_dataset",
]
