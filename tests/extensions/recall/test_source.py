"""Documents of pairs and questions: what they ask, how they are drawn, what a spec may ask for."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.data.sources import get_source
from kvlab.data.tokenizers import load_tokenizer
from kvlab.extensions.recall.config import RecallConfig
from kvlab.extensions.recall.source import draw_documents, write_tokens
from kvlab.spec import DataConfig
from tests.contracts.source_contract import SourceContract
from tests.data.conftest import data_home  # noqa: F401
from tests.extensions.recall.recalls import experiment, read_document


class TestRecallContract(SourceContract):
    reads_files = False

    @pytest.fixture
    def data(self):
        return experiment().data


@st.composite
def configs(draw):
    pairs = sorted(draw(st.sets(st.integers(1, 9), min_size=1, max_size=3)))
    rewrites = draw(st.integers(0, pairs[0] // 2))
    return RecallConfig(
        form=draw(st.sampled_from(["fused", "separate"])),
        keys=draw(st.integers(max(1, pairs[-1] - rewrites), 12)),
        values=draw(st.integers(2, 9)),
        pairs=pairs,
        questions=draw(st.integers(1, pairs[0] - rewrites)),
        rewrites=rewrites,
        gap=draw(st.integers(0, 5)),
        power=draw(st.sampled_from([None, 0.01, 2.0])),
        documents=draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 9)),
    )


def plain_documents(config, pairs, first, count):
    """The same documents, one draw after the other, from lists."""
    words = np.random.Philox(key=[0x726563616C6C, config.seed], counter=[0, 0, pairs, first])

    def take(width):
        flat = words.random_raw(count * width).tolist() if width else []
        return [flat[i * width : (i + 1) * width] for i in range(count)]

    size, new = config.pair_tokens, pairs - config.rewrites
    noise = size * (max(config.pairs) - pairs) + config.gap
    of_names, of_order, of_values = take(config.keys), take(pairs), take(pairs)
    of_questions, of_noise = take(config.questions * pairs), take(noise)
    end = size * pairs + config.gap
    for i in range(count):
        names = sorted(range(config.keys), key=of_names[i].__getitem__)[:new]
        repeated = names + names[: config.rewrites]
        keys = [repeated[j] for j in sorted(range(pairs), key=of_order[i].__getitem__)]
        values = [word % config.values for word in of_values[i]]
        last = {key: place for place, key in enumerate(keys)}
        asked = []
        for question in range(config.questions):
            clocks = {}
            for place in last.values():
                word = of_questions[i][question * pairs + place]
                distance = end + 2 * question - (size * place + size - 1)
                weight = float(distance) ** ((config.power or 1.0) - 1)
                if place not in asked:
                    clocks[place] = -math.log1p(-((word >> 11) * 2.0**-53)) / weight
            asked.append(min(clocks, key=clocks.__getitem__))
        yield (
            [(keys[j], values[j]) for j in range(pairs)],
            [(keys[j], values[j]) for j in asked],
            [word % 16 for word in of_noise[i]],
        )


@settings(max_examples=60)
@given(configs())
def test_documents_are_those_of_a_plain_generator(config):
    for pairs in config.pairs:
        tokens = write_tokens(config, draw_documents(config, pairs, 2000, 7)).tolist()
        plain = plain_documents(config, pairs, 2000, 7)
        for row, (shown, asked, noise) in zip(tokens, plain, strict=True):
            found, questions = read_document(config, row)
            assert [one[:2] for one in found] == shown
            assert [one[:2] for one in questions] == asked
            assert [
                one - (config.symbols - 16) for one in row if one >= config.symbols - 16
            ] == noise
            assert len(row) == config.document_tokens - 1


@settings(max_examples=60)
@given(configs())
def test_the_last_value_of_a_key_answers_and_each_key_is_asked_once(config):
    data = DataConfig(source="recall", tokenizer=f"symbols:{config.symbols}", recall=config)
    source, tokenizer = get_source("recall"), load_tokenizer(data.tokenizer)
    counts = Counter()
    for unit in source.units(data, print):
        for text, group in source.read(unit):
            pairs, questions = read_document(config, tokenizer.encode(text))
            last = {key: value for key, value, _ in pairs}
            assert [last[key] for key, _, _ in questions] == [value for _, value, _ in questions]
            assert len({key for key, _, _ in questions}) == len(questions) == config.questions
            assert len(last) == len(pairs) - config.rewrites
            assert group is None
            counts[len(pairs)] += 1
    assert sum(counts.values()) == config.documents
    assert max(counts.values()) - min(counts[n] for n in config.pairs) <= 1


def test_a_text_is_made_of_whole_documents_and_splits_share_none():
    of = experiment({"pairs": [2, 4], "questions": 2, "gap": 3})
    dataset = prepare_dataset(of.data, workers=1)
    length, config = of.model.block_size, of.data.recall
    splits = [
        split[:].reshape(-1, length).astype(int) for split in (dataset.train, dataset.validation)
    ]
    for split in splits:
        assert (split[:, 0] == of.data.vocabulary.end_of_text).all()
        for row in split.tolist():
            read_document(config, row[1:])
    train, held_out = ({tuple(row) for row in split.tolist()} for split in splits)
    assert len(train | held_out) > 390, "of 400"
    assert not train & held_out
    other = experiment({"pairs": [2, 4], "questions": 2, "gap": 3, "seed": 1})
    assert prepare_dataset(other.data, workers=1).digest != dataset.digest


@pytest.mark.parametrize("form", ["fused", "separate"])
def test_a_question_alone_does_not_tell_its_answer(form):
    """Nor does its place: whoever knows all but the document's pairs is right by chance."""
    config = RecallConfig(form=form, keys=8, values=4, pairs=8, questions=8)
    tokens = write_tokens(config, draw_documents(config, 8, 0, 2000)).tolist()
    counts, right, asked = {}, 0, 0
    for number, row in enumerate(tokens):
        for place, (key, answer, _) in enumerate(read_document(config, row)[1]):
            for seen in (key, place), key:
                counts.setdefault(seen, Counter())
            if number < 1000:
                counts[key, place][answer] += 1
                counts[key][answer] += 1
            else:
                best = counts[key, place].most_common(1)[0][0], counts[key].most_common(1)[0][0]
                right, asked = right + sum(one == answer for one in best), asked + 2
    assert abs(right / asked - 1 / 4) < 4 * math.sqrt(1 / 4 * 3 / 4 / (asked / 2))
