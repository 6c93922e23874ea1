"""What every source of documents must do. It imports no torch, nor does the process it starts."""

from itertools import islice, zip_longest
from tempfile import TemporaryDirectory

from kvlab.data import token_pieces
from kvlab.data.dataset_builder import select_documents, validation_mask
from kvlab.data.sources.user_documents import UserDocuments
from kvlab.spec.data_config import DataConfig
from kvlab.spec.members import MemberError
from kvlab.spec.source_options import DocumentSource
from kvlab.spec.validation_errors import format_value

CHECKED_DOCUMENTS = 2000


def _list_documents(source: DocumentSource, data: DataConfig) -> list[str]:
    return list(islice(UserDocuments(source).documents(data), CHECKED_DOCUMENTS))


def check_source(source: DocumentSource, data: DataConfig) -> tuple[int, str]:
    """A source yields text, the same in another process; return how many documents, and which."""
    from loky import ProcessPoolExecutor  # type: ignore[import-untyped]

    found = _list_documents(source, data)
    with ProcessPoolExecutor(1) as pool:
        again = pool.submit(_list_documents, source, data).result()
    for number, (one, other) in enumerate(zip_longest(found, again), 1):
        if one != other:
            text = f"yields {format_value(one)} as document {number}, and in another process"
            raise MemberError(source, f"{text} {format_value(other)}")
    with TemporaryDirectory() as folder:
        unit = {"key": "checked", "documents": found}
        job = token_pieces.PieceJob(data.source, data.tokenizer, folder, unit)
        token_pieces.write_piece(job)
        table = token_pieces.read_document_table(job)
    table, copies = select_documents(table, is_shuffled=True, max_bytes=None)
    held_out = validation_mask(table, share := data.validation_fraction).sum()
    text = f"documents, {copies} copies or near-duplicates"
    return len(found), f"{text}; validation_fraction {share:g} holds out {held_out}"
