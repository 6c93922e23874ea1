"""`none`: every layer owns its K/V."""

from kvlab.sharing.pattern import Groups, no_argument


def groups(argument: str, _kinds: str) -> Groups:
    no_argument(argument)
    return []
