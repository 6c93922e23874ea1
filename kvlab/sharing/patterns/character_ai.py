"""`character-ai`: the grouping of the Character.AI article's code, by position in blocks of six.

Layers 0, 6, 12, ... share one cache; in each block the next three share, and the last two. On
12 layers: [0,6] [1,2,3] [4,5] [7,8,9] [10,11]. (The article's prose says two, then three.)
"""

from kvlab.sharing.pattern import Groups, no_argument

BLOCK = 6


def groups(argument: str, kinds: str) -> Groups:
    no_argument(argument)
    depth = len(kinds)
    found = [list(range(0, depth, BLOCK))]
    for start in range(0, depth, BLOCK):
        found += [
            [layer for layer in range(start + low, start + high) if layer < depth]
            for low, high in ((1, 4), (4, 6))
        ]
    return [group for group in found if group]
