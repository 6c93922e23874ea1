"""Small recall experiments, and a reader of documents that knows nothing of how they are drawn."""

from kvlab.spec import Experiment


def experiment(recall=(), model=(), training=(), **parts):
    """A model of two layers; without other options a document of 4 pairs and 4 questions."""
    recall = {
        "keys": 6,
        "values": 3,
        "pairs": 4,
        "questions": 4,
        "gap": 0,
        "documents": 400,
        **dict(recall),
    }
    fused = recall.get("form", "fused") == "fused"
    keys, values = recall["keys"], recall["values"]
    symbols = 16 + keys + 2 * values * (keys if fused else 1)
    most = recall["pairs"] if isinstance(recall["pairs"], int) else max(recall["pairs"])
    block = 1 + most * (1 if fused else 2) + recall["gap"] + 2 * recall["questions"]
    shape = {"vocab_size": symbols + 1, "block_size": block, "n_layer": 2, "n_head": 2}
    return Experiment(
        name="small",
        model={**shape, "n_embd": 16, "position": "rope", **dict(model)},
        data={
            "source": "recall", "tokenizer": f"symbols:{symbols}", "validation_fraction": 0.2,
            "recall": recall,
        },
        training={
            "tokens": 8 * block * 8, "batch_tokens": 8 * block, "learning_rate": 1e-2,
            "evaluate_tokens": 10 * block, **dict(training),
        },
        evaluation={"loss_tokens": 20 * block},
        benchmark={"prompt_tokens": 4, "new_tokens": 2},
        **parts,
    )  # fmt: skip


def read_document(config, tokens):
    """Return pairs, [(key, value, place)], and questions, [(key, answer, place)], of one document.

    Args:
        tokens: its ids without the end of text.
    """
    keys, values, fused = config.keys, config.values, config.form == "fused"
    first_key = keys * values if fused else 0
    first_answer = first_key + keys + (0 if fused else values)
    last_answer = first_answer + (keys * values if fused else values)
    pairs, questions, place = [], [], 0
    while place < len(tokens):
        token = tokens[place]
        following = tokens[place + 1] if place + 1 < len(tokens) else -1
        if fused and token < first_key:
            pairs.append((token // values, token % values, place))
        elif first_key <= token < first_key + keys:
            key = token - first_key
            place += 1
            if first_answer <= following < last_answer:
                answer = following - first_answer
                questions.append((key, answer % values, place))
                assert not fused or answer // values == key, "the answer names its pair"
            else:
                assert not fused
                pairs.append((key, following - first_key - keys, place))
        else:
            assert token >= last_answer, "noise"
        place += 1
    return pairs, questions
