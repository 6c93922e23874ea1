"""`sandwich`: the first and the last layer of each kind keep their own K/V, all between share.

"KeepEnds" in the cross-layer attention paper (arXiv 2405.12981) keeps both ends of the stack
apart in the same way; here the middle is one group.
"""

from kvlab.sharing.pattern import Groups, layers_by_kind, no_argument


def groups(argument: str, kinds: str) -> Groups:
    no_argument(argument)
    return [layers[1:-1] for layers in layers_by_kind(kinds) if len(layers) > 2]
