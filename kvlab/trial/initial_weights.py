"""Where a training's first weights come from, when they are not freshly drawn. No torch."""

from dataclasses import dataclass

from kvlab.data.file_hashes import cached_sha256
from kvlab.errors import DataError, PretrainedError
from kvlab.hf_checkpoints import list_checkpoint_files, resolve_checkpoint_folder
from kvlab.spec.model_config import ModelConfig

ID_LENGTH = 16
"""Hex digits of a fingerprint that make an id: 64 bits."""


@dataclass(frozen=True)
class CheckpointWeights:
    """From a published checkpoint.

    Attributes:
        name: as the record shows it: a repository, or a folder's last name.
        place: the repository, or the folder's absolute path.
        identity: `checkpoint_identity` of its files.
    """

    name: str
    place: str
    identity: dict[str, str]


@dataclass(frozen=True)
class TrainedWeights:
    """From another training, which must be done first.

    Attributes:
        name: the levels that lead to it, as written, and the seed.
        fingerprint: its training fingerprint.
        model: what was trained there.
    """

    name: str
    fingerprint: str
    model: ModelConfig

    @property
    def training_id(self) -> str:
        return self.fingerprint[:ID_LENGTH]

    @property
    def identity(self) -> dict[str, str]:
        return {"training": self.fingerprint}


InitialWeights = CheckpointWeights | TrainedWeights


def checkpoint_identity(place: str, *, download: bool = True) -> dict[str, str]:
    """sha256 of every file that a model is read from, by name.

    Raises:
        PretrainedError: there is no such checkpoint, or a file of it is missing.
    """
    files = list_checkpoint_files(resolve_checkpoint_folder(place, download=download))
    try:
        digests = cached_sha256([path.resolve() for path in files])
    except DataError as error:
        raise PretrainedError(str(error)) from None
    return {path.name: digests[path.resolve()] for path in files}
