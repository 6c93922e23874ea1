"""Any task of EleutherAI's lm-eval harness on any model of ours: ``pip install kvlab[lm-eval]``.

    from lm_eval import simple_evaluate
    from kvlab.trial.lm_eval_adapter import harness_model

    simple_evaluate(harness_model(open_model("4f2a", Store("runs"))), tasks=["hellaswag"])

The only module that imports lm_eval.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kvlab.data import Tokenizer, load_tokenizer
from kvlab.errors import UsageError
from kvlab.evaluate.scoring import Pair, score_pairs
from kvlab.model.generate import decode_step, prefill
from kvlab.trial.model_targets import OpenedModel


def harness_model(opened: OpenedModel, *, served: bool = False) -> Any:
    """An ``lm_eval.api.model.LM`` of ``opened``.

    Args:
        served: score token by token through the cache that serves it, tied and coarse as it is.

    Raises:
        UsageError: lm-eval is not installed, or the model's tokenizer is not known.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        text = f"lm-eval cannot be imported ({error})"
        raise UsageError(f"{text}; run pip install 'kvlab[lm-eval]'") from None
    if opened.tokenizer is None:
        raise UsageError(f"the tokenizer of {opened.name} is not known; use a trial or gpt2")
    scorer = Scorer(opened, load_tokenizer(opened.tokenizer), served)

    class KvlabLM(LM):  # type: ignore[misc]  # lm-eval has no types
        """Requests in, numbers out; see lm-eval's guide to models."""

        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            return scorer.continuations([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            return [scorer.whole(request.args[0]) for request in requests]

        def generate_until(self, requests: Any) -> list[str]:
            return [scorer.generated(*request.args) for request in requests]

    return KvlabLM()


class Scorer:
    """What the harness asks, of texts."""

    def __init__(self, opened: OpenedModel, words: Tokenizer, served: bool):
        self._model, self._words = opened.model.eval(), words
        self._serving = opened.serving if served else None

    def continuations(self, texts: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log-likelihood of each after its context, and whether greedy decoding says it.

        Raises:
            UsageError: a continuation is empty.
        """
        pairs = [self._pair(context, ending) for context, ending in texts]
        scores = score_pairs(self._model, pairs, self._serving)
        return [(-score.nats, score.is_greedy) for score in scores]

    def whole(self, text: str) -> float:
        """Log-likelihood of a text of any length, each token predicted once.

        In windows of block_size as the harness has them: all but the first begin with the last
        token of the one before, and the last is filled up with the tokens before it.
        """
        block = self._model.config.block_size
        ids = [self._words.end_of_text, *self._words.encode(text)]
        pairs = []
        for start in range(0, len(ids) - 1, block):
            end = min(start + block + 1, len(ids))
            pairs.append((ids[max(0, end - block - 1) : start + 1], ids[start + 1 : end]))
        return -sum(score.nats for score in score_pairs(self._model, pairs, self._serving))

    @torch.inference_mode()
    def generated(self, context: str, options: dict[str, Any]) -> str:
        """Greedy text after ``context``, up to a stop text, ``max_gen_toks`` or the end of text.

        Raises:
            UsageError: sampling is asked for, or more tokens than the model holds.
        """
        if options.get("do_sample") or options.get("temperature", 0.0):
            raise UsageError("do_sample is asked for, and tasks here are answered greedily only")
        stops = options.get("until", [])
        stops = [stops] if isinstance(stops, str) else stops
        block, most = self._model.config.block_size, int(options.get("max_gen_toks", 256))
        if not 0 < most < block:
            text = f"max_gen_toks = {most} is not from 1 to {block - 1}, which leave a context in"
            way_out = "set it in the task's generation_kwargs"
            raise UsageError(f"{text} model.block_size = {block}; {way_out}")
        ids = (self._words.encode(context) or [self._words.end_of_text])[-(block - most) :]
        cache = self._model.new_cache(1, block, self._serving)
        device = self._model.device
        logits = prefill(self._model, torch.tensor([ids], device=device), cache)
        made: list[int] = []
        while len(made) < most:
            token = int(logits[0, : self._words.vocab_size].argmax())
            if token == self._words.end_of_text:
                break
            made.append(token)
            text = self._words.decode(made)
            ends = [text.index(stop) for stop in stops if stop and stop in text]
            if ends:
                return text[: min(ends)]
            logits = decode_step(self._model, torch.tensor([token], device=device), cache)
        return self._words.decode(made)

    def _pair(self, context: str, ending: str) -> Pair:
        """As the harness has it: spaces at the context's end belong to the continuation, whose
        tokens are what the whole text has beyond the context's.

        Raises:
            UsageError: there are none.
        """
        kept = context.rstrip()
        said = context[len(kept) :] + ending
        first = self._words.encode(kept) if kept else []
        rest = self._words.encode(kept + said)[len(first) :]
        if not rest:
            text = f"continuation = {ending!r} has no tokens of its own after {context[-40:]!r}"
            raise UsageError(f"{text}; give the task choices that are not empty")
        return first or [self._words.end_of_text], rest
