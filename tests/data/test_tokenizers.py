"""GPT-2's ids, prefixes compared with a plain byte-pair encoder, and bytes."""

from itertools import pairwise

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.data.tokenizers import load_gpt2_ranks, load_tokenizer
from kvlab.errors import DataError

TEXTS = [
    "Hello world",
    "",
    " ",
    "   leading, trailing   ",
    "tabs\t\tand\n\n\nlines \n \n x\r\n",
    "naïve façade, Ærøskøbing, Dvořák",
    "日本語の文章。中文也可以。한국어도.",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 and 🇳🇱 e\u0301",
    "don't we'll I'VE they're it's 'tis",
    "x=3.14159;y=12345678901234567890",
    "a<|endoftext|>b <|endoftext|>",
    "\u00a0nbsp\u2003em\u200bzero\ufeff",
    "a" * 300,
    "def f(x):\n        return x ** 2  # done\n",
]
PATTERN = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
NAMES = ["gpt2", "gpt2:257", "bytes"]


def plain_bpe(text, ranks):
    """Byte-pair encoding by its definition: join the pair of lowest rank, again and again."""
    ids = []
    for word in PATTERN.findall(text):
        parts = [bytes([byte]) for byte in word.encode()]
        while len(parts) > 1:
            pairs = [ranks.get(a + b, 10**9) for a, b in pairwise(parts)]
            best = min(pairs)
            if best == 10**9:
                break
            index = pairs.index(best)
            parts[index : index + 2] = [parts[index] + parts[index + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def test_known_ids():
    gpt2, plain = load_tokenizer("gpt2"), load_tokenizer("bytes")
    assert (gpt2.encode("Hello world"), plain.encode("é!")) == ([15496, 995], [0xC3, 0xA9, 0x21])
    # bytes that are not printed have the ids that transformers gives them
    assert gpt2.encode("日\x00\x7f\xad\xa0") == [33768, 98, 188, 221, 3907, 1849]
    assert (gpt2.vocab_size, gpt2.end_of_text) == (50257, 50256)
    assert (plain.vocab_size, plain.end_of_text) == (257, 256)


@pytest.mark.parametrize("ranks", [256, 300, 50256])
def test_gpt2_and_its_prefixes_are_plain_byte_pair_encoding(ranks):
    kept = {token: rank for token, rank in load_gpt2_ranks().items() if rank < ranks}
    words = load_tokenizer(f"gpt2:{ranks}")

    @settings(max_examples=40)
    @given(st.text("ab 'stre\n\té日語ßЖ👍🏽0179.,;(<|>", max_size=80))
    def compare(text):
        assert words.encode(text) == plain_bpe(text, kept)

    compare()
    for text in TEXTS:
        assert words.encode(text) == plain_bpe(text, kept)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(text=TEXT)
def test_any_text_survives_a_round_trip(name, text):
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.end_of_text for token in ids)


@pytest.mark.parametrize("name", ["gpt2:2048", "bytes"])
def test_edges_of_text_and_vocabulary(name):
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode("one<|endoftext|>two")
    assert tokenizer.end_of_text not in ids, "its characters are text"
    assert tokenizer.decode(ids) == "one<|endoftext|>two"
    assert tokenizer.decode([ids[0], tokenizer.end_of_text])[-13:] == "<|endoftext|>"
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb", "a lone surrogate"
    for unknown in (-1, tokenizer.vocab_size):
        with pytest.raises(DataError, match="is not in"):
            tokenizer.decode([0, unknown])


@pytest.mark.parametrize("name", ["gpt3", "gpt2:", "gpt2:255", "gpt2:50257", "gpt2:x", "", "byte"])
def test_unknown_names_are_refused(name):
    with pytest.raises(DataError, match="use gpt2"):
        load_tokenizer(name)


def test_a_symbol_is_a_character_and_a_token():
    symbols = load_tokenizer("symbols:300")
    assert (symbols.vocab_size, symbols.end_of_text) == (301, 300)
    text = symbols.decode([0, 299, 17])
    assert [ord(letter) for letter in text] == [0x4E00, 0x4E00 + 299, 0x4E00 + 17]
    assert symbols.encode(text) == [0, 299, 17]
    assert symbols.decode([5, 300, 6]) == f"{chr(0x4E05)}<|endoftext|>{chr(0x4E06)}"
    assert symbols.token_bytes().tolist() == [len(text[:1].encode())] * 300 + [0]
    for other in ("a", chr(0x4E00 + 300), "\ud800"):
        with pytest.raises(DataError, match="has no symbol for"):
            symbols.encode(text + other)
    with pytest.raises(DataError, match="symbols:1 to symbols:20000"):
        load_tokenizer("symbols:20001")
