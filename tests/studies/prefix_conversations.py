"""Random branching conversations through a prefix cache, against cold runs and a plain reference.

    python -m tests.studies prefix_conversations --conversations 1000

A session is a random layout (rings, sinks, eviction, sharing, ties, formats, kinds of attention),
a budget, and ten conversations that continue or leave earlier ones anywhere. It is a function of
its number alone. After every turn:

- the logits of each reply equal those of a cold run, to 1e-10 in float64. Where what is stored
  depends on passes (``tie_rule: overwrite``), the cold run has the passes that the turn and the
  turns that it took over had;
- what the row holds is that of the cold run, bit for bit where it is codes;
- hit, entries, their order and the bytes are those of `ReferenceCache`, which searches lists;
- the bytes are those of the tensors, and within the budget.
"""

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from kvlab.cache import KVCache
from kvlab.extensions.conversations.prefix_cache import PrefixCache, join_keys, path_to
from kvlab.extensions.conversations.turns import Turn, run_tokens
from kvlab.layout import KVLayout
from kvlab.layout.slot_plan import TokenSlot
from kvlab.model import GPT
from kvlab.own_extensions import load_parts
from kvlab.spec import ServingConfig
from tests.studies import read_options
from tests.studies.fuzz_model import LONGEST, Case, draw_case, make_model, poison

TOLERANCE = 1e-10
CONVERSATIONS = 10
"""Of one session."""

TRAITS: list[Callable[[Case, KVLayout], bool]] = [
    lambda case, _: case.number >= 0,  # any
    lambda _, layout: layout.depends_on_passes and layout.keeps_all_tokens(LONGEST),
    lambda _, layout: layout.depends_on_passes and not layout.keeps_all_tokens(LONGEST),
    lambda case, layout: case.serving.kv_dtype in ("int8", "int4", "fp8") and _has_ring(layout),
    lambda case, layout: case.config.sink_tokens > 0 and _has_ring(layout),
]
"""What the sessions are in turn, so that what is drawn rarely is tried as often as the rest."""

if load_parts().keys() & {"latent_kv", "tied_kv"}:
    TRAITS += [lambda case, _: case.config.kv != "separate"]
if "kivi" in load_parts():
    TRAITS += [
        lambda _, layout: _has_blocks(layout) and not _has_ring(layout),
        lambda _, layout: _has_blocks(layout) and _has_ring(layout),
    ]
if "eviction" in load_parts():
    TRAITS += [lambda _, layout: _drops_tokens(layout)]


def _has_ring(layout: KVLayout) -> bool:
    return any(plan.layer.window for plan in layout.plans)


def _has_blocks(layout: KVLayout) -> bool:
    return not all(plan.has_single_tokens for plan in layout.plans if plan.layer.stores_tokens)


def _drops_tokens(layout: KVLayout) -> bool:
    slots = [plan for plan in layout.plans if isinstance(plan, TokenSlot)]
    return any(not plan.layer.window and not plan.keeps_all_tokens(LONGEST) for plan in slots)


def draw_session_case(number: int) -> tuple[Case, KVLayout]:
    """Return the model and the layout of a session."""
    for case_number in itertools.count(10_000 * number):
        case = draw_case(case_number)
        layout = KVLayout.of(case.config, case.serving)
        if TRAITS[number % len(TRAITS)](case, layout):
            return case, layout
    raise AssertionError("numbers do not end")


Key = tuple[tuple[int, bool], ...]
"""Tokens, and whether a pass begins with each, where that counts."""


@dataclass
class ReferenceNode:
    """The tokens of a key beyond the longest other key that begins it."""

    last_used: int = 0
    has_snapshot: bool = False


@dataclass
class ReferenceCache:
    """A prefix cache that searches all keys for everything."""

    layout: KVLayout
    context: int
    budget: int
    every: int
    nodes: dict[Key, ReferenceNode] = field(default_factory=dict)
    clock: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether every position counts."""
        return self.layout.keeps_all_tokens(self.context)

    def start(self, key: Key) -> int:
        return max((len(k) for k in self.nodes if len(k) < len(key) and key[: len(k)] == k),
                   default=0)  # fmt: skip

    def children(self, key: Key) -> list[Key]:
        return [k for k in self.nodes if len(k) > len(key) and k[: len(key)] == key
                and self.start(k) == len(key)]  # fmt: skip

    def path(self, key: Key) -> list[Key]:
        return sorted((k for k in self.nodes if key[: len(k)] == k), key=len)

    def segment_bytes(self, start: int, end: int) -> int:
        return self.layout.segment_bytes(start, end, self.context, "float64")

    def snapshot_bytes(self, key: Key) -> int:
        return self.layout.snapshot_bytes(len(key), self.context, "float64")

    def bytes(self) -> int:
        return sum(
            self.segment_bytes(self.start(key), len(key))
            + (self.snapshot_bytes(key) if node.has_snapshot else 0)
            for key, node in self.nodes.items()
        )

    def entries(self) -> list[Key]:
        """Return what can be dropped, in this order."""
        parents = [key[: self.start(key)] for key in self.nodes]
        entries = [k for k, node in self.nodes.items() if self.is_whole or node.has_snapshot]

        def priority(key: Key) -> tuple[bool, int, int]:
            is_superseded = not self.is_whole and parents.count(key) == 1
            return (not is_superseded, self.nodes[key].last_used, -len(key))

        return sorted(entries, key=priority)

    def evict(self, kept: list[Key]) -> None:
        if self.is_whole:
            leaves = (k for k in self.entries() if not self.children(k) and k not in kept)
            del self.nodes[next(leaves)]
            return
        key = self.entries()[0]
        self.nodes[key].has_snapshot = False
        while key in self.nodes and not (
            self.children(key) or self.nodes[key].has_snapshot or key in kept
        ):
            parent = key[: self.start(key)]
            del self.nodes[key]
            key = parent

    def use(self, path: list[Key]) -> None:
        for key in reversed(path if self.is_whole else path[-1:]):
            self.clock += 1
            self.nodes[key].last_used = self.clock

    def find_hit(self, tokens: list[int], limit: int) -> Key:
        """Return the key of the longest usable prefix, of several the most recently used."""
        best, used = (), 0
        for key, node in self.nodes.items():
            ids = [token for token, _ in key]
            common = next((i for i, (a, b) in enumerate(zip(ids, tokens, strict=False)) if a != b),
                          min(len(ids), len(tokens)))  # fmt: skip
            common = min(common, limit)
            if common <= self.start(key) or not (self.is_whole or node.has_snapshot):
                continue
            if not self.is_whole and common < len(key):
                continue
            if (common, node.last_used) > (len(best), used):
                best, used = key[:common], node.last_used
        return best

    def restore(self, tokens: list[int], limit: int) -> Key:
        hit = self.find_hit(tokens, limit)
        if hit:
            inside = [k for k in self.nodes if k[: len(hit)] == hit and self.start(k) < len(hit)]
            self.use([*(k for k in self.path(hit) if k != hit), *inside])
        return hit

    def insert(self, key: Key) -> None:
        whole = self.segment_bytes(0, len(key)) + self.snapshot_bytes(key)
        if whole > self.budget:
            return
        held = max((_count_common(k, key) for k in self.nodes), default=0)
        if held and key[:held] not in self.nodes:
            held = self.split(key[:held])
        path = self.path(key[:held])
        is_new = held < len(key) or not (self.is_whole or self.nodes[key].has_snapshot)
        added = self.segment_bytes(held, len(key)) + is_new * self.snapshot_bytes(key)
        while self.bytes() + added > self.budget:
            self.evict(path)
        for start in range(held, len(key), self.every):
            self.nodes[key[: start + self.every]] = ReferenceNode()
        if not self.is_whole:
            self.nodes[key].has_snapshot = True
        self.use(self.path(key))

    def split(self, key: Key) -> int:
        """Make ``key`` a node; return how much of it is stored after that."""
        (node,) = (k for k in self.nodes if k[: len(key)] == key and self.start(k) < len(key))
        start = self.start(node)
        copied = self.segment_bytes(start, len(node))
        while node in self.nodes and self.bytes() + copied > self.budget:
            self.evict(self.path(key[:start]))
        if node not in self.nodes:
            return start
        self.nodes[key] = ReferenceNode(self.nodes[node].last_used)
        return len(key)


def _count_common(first: Key, second: Key) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


class Session:
    """Conversations with one model and one prefix cache.

    Attributes:
        turns, hits: so far, and the tokens that were taken over.
        largest_error: of any logit.
    """

    def __init__(self, number: int):
        self.case, self.layout = draw_session_case(number)
        self.case.dtype = torch.float64
        self.model: GPT = make_model(self.case)
        self.rng = random.Random(number)
        self.serving: ServingConfig = self.case.serving
        one = self.layout.segment_bytes(0, 24, LONGEST, "float64")
        one += self.layout.snapshot_bytes(24, LONGEST, "float64")
        budget = self.rng.choice([0, one, 2 * one, 5 * one, 5 * one, 10**9])
        every = self.rng.choice([2, 5, 8, 20])
        self.prefix_cache = PrefixCache(budget, snapshot_every=every)
        self.reference = ReferenceCache(self.layout, LONGEST, budget, every)
        self.texts: list[list[int]] = []
        self.turns = self.hits = 0
        self.largest_error = 0.0

    def run(self, conversations: int = CONVERSATIONS) -> None:
        """Have some conversations.

        Raises:
            AssertionError: something differs.
        """
        for _ in range(conversations):
            text = self._draw_start()
            for _ in range(self.rng.randint(1, 4)):
                prompt = [*text, *self._draw_tokens(self.rng.choice([1, 2, 5, 9]))]
                if len(prompt) > LONGEST - 1:
                    break
                reply = self._draw_tokens(self.rng.randint(0, min(6, LONGEST - len(prompt))))
                self._take_turn(prompt, reply)
                text = [*prompt, *reply]
                self.texts.append(text)

    def _draw_start(self) -> list[int]:
        if not self.texts or self.rng.random() < 0.2:
            return []
        text = self.rng.choice(self.texts)
        return text[: self.rng.randint(0, len(text))] if self.rng.random() < 0.6 else text

    def _draw_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.case.config.vocab_size) for _ in range(count)]

    def _new_cache(self) -> KVCache:
        cache = self.model.new_cache(1, LONGEST, self.serving)
        for tensor in cache.tensors:
            poison(tensor, is_finite=True)
        return cache

    @torch.inference_mode()
    def _take_turn(self, prompt: list[int], reply: list[int]) -> None:
        cache = self._new_cache()
        run = partial(run_tokens, self.model, cache)
        turn = Turn(prompt, cache, self.prefix_cache, run, weights="w")
        hit = self.reference.restore(prompt, len(prompt) - 1)
        logits = [turn.prefill()]
        assert turn.hit == len(hit), "the longest match over the same snapshots"
        starts = [i for i, (_, is_start) in enumerate(hit) if is_start]
        starts += [turn.hit, *turn.pass_ends[:-1]]
        for end in turn.pass_ends[:-1]:
            self.reference.insert(self._make_key(prompt[:end], starts))
        for token in reply[:-1]:
            turn.tokens.append(token)
            starts.append(cache.length)
            logits.append(self.model(torch.tensor([[token]]), cache=cache)[:, -1])
        turn.tokens += reply[-1:]
        starts += [cache.length] if reply else []
        turn.finish()
        self.reference.insert(self._make_key(turn.tokens, starts))
        self._compare_with_cold_run(turn.tokens, starts, len(prompt), torch.cat(logits), cache)
        self._compare_with_reference()
        self.turns += 1
        self.hits += turn.hit

    def _make_key(self, tokens: list[int], starts: list[int]) -> Key:
        counted = set(starts) if self.layout.depends_on_passes else set()
        return tuple((token, i in counted) for i, token in enumerate(tokens))

    def _compare_with_cold_run(
        self, tokens: list[int], starts: list[int], prompt: int, logits: torch.Tensor,
        cache: KVCache,
    ) -> None:  # fmt: skip
        cold = self._new_cache()
        if not self.layout.depends_on_passes:
            starts = [0, *range(prompt, len(tokens))]
        ends = [*starts[1:], len(tokens)]
        out = torch.cat([
            self.model(torch.tensor([tokens[start:end]]), cache=cold)[0]
            for start, end in zip(starts, ends, strict=True)
        ])  # fmt: skip
        error = (out[prompt - 1 : prompt - 1 + len(logits)] - logits).abs().max()
        assert error <= TOLERANCE, error
        self.largest_error = max(self.largest_error, float(error))
        for warm_tensor, cold_tensor in zip(_held(tokens, cache), _held(tokens, cold), strict=True):
            if warm_tensor.dtype.itemsize == 8:
                assert (warm_tensor - cold_tensor).abs().max() <= TOLERANCE
            else:
                assert torch.equal(_as_bytes(warm_tensor), _as_bytes(cold_tensor)), "codes"

    def _compare_with_reference(self) -> None:
        tensors = self.prefix_cache.tensors
        held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        assert self.prefix_cache.bytes_held == held == self.reference.bytes()
        assert held <= self.prefix_cache.bytes_budget
        entries = self.prefix_cache.list_entries()
        texts = [node.tree.split_key(join_keys(path_to(node))) for node in entries]
        keys = [self._make_key(ids.tolist(), starts) for ids, starts in texts]
        assert keys == self.reference.entries()


def _held(tokens: list[int], cache: KVCache) -> list[torch.Tensor]:
    """Return copies of all that goes on from a row's tokens."""
    copies = PrefixCache(10**9)
    copies.insert(tokens, cache, weights=None)
    return [tensor for tensor in copies.tensors if tensor.numel()]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def main() -> int:
    """Run many conversations and print every session that failed; return 1 if there was one."""
    options = read_options(__doc__, conversations=1000, first=0)
    torch.set_num_threads(1)
    start, failures, turns, hits, largest = time.perf_counter(), 0, 0, 0, 0.0
    sessions = -(-options.conversations // CONVERSATIONS)
    for number in range(options.first, options.first + sessions):
        session = Session(number)
        try:
            session.run()
        except AssertionError as error:
            failures += 1
            print(f"session {number}, turn {session.turns}: {error}\n  {session.case}")
        turns, hits = turns + session.turns, hits + session.hits
        largest = max(largest, session.largest_error)
    seconds = time.perf_counter() - start
    print(
        f"{sessions * CONVERSATIONS:,} conversations, {turns:,} turns, {hits:,} tokens taken over,"
        f" largest error {largest:.2g}, {failures} sessions failed, {seconds:.0f} s"
    )
    return int(failures > 0)
