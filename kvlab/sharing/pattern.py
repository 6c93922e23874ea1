"""The contract of a sharing pattern, and what its members share.

A pattern is a function ``groups(argument, kinds) -> list of groups``: ``argument`` is the
text after the colon (``"2"`` in ``adjacent:2``), ``kinds`` one letter a layer. Each group is
a list of layers of one kind; its lowest layer owns. Layers in no group own themselves.
"""

Groups = list[list[int]]
Sharing = str | list[list[int]] | list[int] | tuple[tuple[int, ...], ...] | tuple[int, ...]


class SharingError(ValueError):
    """A sharing that is not known or not possible; the text goes after ``kv_sharing = x``."""


def layers_by_kind(kinds: str) -> Groups:
    """The layers of each kind that occurs, in depth order."""
    return [[i for i, kind in enumerate(kinds) if kind == k] for k in "GL" if k in kinds]


def no_argument(argument: str) -> None:
    if argument:
        raise SharingError("takes no number; leave out the colon")


def whole_number(argument: str, least: int, example: str) -> int:
    if not argument.isdecimal() or len(argument) > 6 or int(argument) < least:
        raise SharingError(f"needs a whole number of at least {least}, such as {example}")
    return int(argument)
