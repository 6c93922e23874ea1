"""Run tasks of EleutherAI's lm-eval harness on kvlab's models: ``pip install kvlab[lm-eval]``.

    from lm_eval import simple_evaluate
    from kvlab.extensions.lm_eval.harness import harness_model

    simple_evaluate(harness_model(open_model("4f2a", Store("runs"))), tasks=["hellaswag"])

A trial runs the tasks of `evaluation.lm_eval`, see `evaluate_tasks`. The only module that imports
lm_eval.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from kvlab.benchmark.session import Variant
from kvlab.data.batches import Tokens
from kvlab.data.tokenizers import Tokenizer, load_tokenizer
from kvlab.errors import DataError, UsageError
from kvlab.evaluate.evaluation import Evaluation, StartPart
from kvlab.evaluate.forward_passes import SILENT, Part
from kvlab.evaluate.scoring import Pair, score_pairs
from kvlab.extensions.lm_eval.config import LmEvalFields, LmEvalTask, find_task_file
from kvlab.model import GPT
from kvlab.model.generate import make_decoder, prefill
from kvlab.spec.experiment import Experiment

FEWSHOT_SEED = 1234
"""lm-eval's own."""


def evaluate_tasks(
    model: GPT,
    validation: Tokens,  # noqa: ARG001
    experiment: Experiment,
    start_part: StartPart,
) -> Evaluation:
    """Run the tasks of an experiment, see `kvlab.evaluate.evaluation.measure_extensions`.

    Results are not kept for an evaluation that goes on: a task's items may have changed by then.
    """
    config = experiment.evaluation
    opened = Variant("trial", model, experiment.serving, experiment.data.tokenizer)
    tasks = LmEvalFields.of(config).lm_eval
    return run_tasks(
        opened, tasks, served=config.served, start_part=lambda *part: _Progress(start_part(*part))
    )


class _Progress(Part):
    """Reports the progress of a part, and keeps no results."""

    def __init__(self, part: Part):
        self._part = part

    def advance(self, count: int, place: str = "") -> None:
        self._part.advance(count, place)


def run_tasks(
    opened: Variant, tasks: Sequence[LmEvalTask], *, served: bool, start_part: StartPart
) -> Evaluation:
    """Run tasks one-shot, and again through the serving cache if ``served``.

    Returns:
        The detail ``tasks`` has, by task: ``harness``, the version of lm-eval; ``version``, that of
        the task; ``items``, a digest of the items; ``outcomes``, by metric one number for each
        item.

    Raises:
        UsageError: lm-eval is not installed, or a task is unknown or asks for what kvlab cannot
            answer.
        DataError: a task's items are unavailable.
    """
    results = Evaluation({}, details={"tasks": {}})
    for task in tasks:
        loaded = _load_task(task)
        from lm_eval.evaluator import evaluate

        for suffix in ("", "_served") if served else ("",):
            start = partial(start_part, f"lm-eval {task.task}{suffix.replace('_', ', ')}")
            model = harness_model(opened, served=bool(suffix), start_part=start)
            found = evaluate(model, loaded, limit=task.limit, bootstrap_iters=0, verbosity="ERROR")
            assert found is not None, "there is one process"
            _add_results(results, task, dict(found), suffix)
    return results


def _load_task(task: LmEvalTask) -> Any:
    """Return lm-eval's task with its items.

    Only the task's own folder is indexed: indexing all tasks takes the better part of a minute.
    """
    try:
        path = find_task_file(task)
    except LookupError as error:
        raise UsageError(f"evaluation.lm_eval: {task.task} {error}") from None
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False, include_path=str(path.parent))
    try:
        loaded = manager.load([task.task])
    except Exception as error:
        text = f"lm-eval cannot load the items of {task.task} ({type(error).__name__}: {error})"
        raise DataError(f"{text}; they are downloaded at first use") from None
    for one in loaded["tasks"].values():
        one.set_fewshot_seed(FEWSHOT_SEED)
    return loaded


def _add_results(results: Evaluation, task: LmEvalTask, found: dict[str, Any], suffix: str) -> None:
    """Add one task's numbers, and its outcomes by item in the order of the items."""
    samples = sorted(found["samples"][task.task], key=lambda sample: sample["doc_id"])
    hashes = [sample["doc_hash"] for sample in samples]
    digest = hashlib.sha256("".join(dict.fromkeys(hashes)).encode()).hexdigest()
    results.measurements[f"{task.metric_prefix}items"] = found["n-samples"][task.task]["effective"]
    facts = {"harness": version("lm-eval"), "version": found["versions"].get(task.task)}
    entries = results.details["tasks"]
    entry = entries.setdefault(task.task, {**facts, "items": digest, "outcomes": {}})
    for key, value in found["results"][task.task].items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        name = metric if chosen == "none" else f"{chosen}_{metric}"
        name = task.metric_prefix + re.sub("[^a-z0-9]+", "_", name.lower()) + suffix
        results.measurements[name] = float(value)
        outcomes = [sample.get(metric) for sample in samples if sample["filter"] == chosen]
        if all(isinstance(outcome, int | float) for outcome in outcomes):
            entry["outcomes"][name] = [float(outcome) for outcome in outcomes]


def harness_model(
    opened: Variant,
    *,
    served: bool = False,
    start_part: Callable[[int], Part] = lambda _count: SILENT,
) -> Any:
    """Return an ``lm_eval.api.model.LM`` of a model.

    Args:
        served: score token by token through its serving cache, instead of one-shot.
        start_part: announces a part by the count of its requests, or of a text's windows.

    Raises:
        UsageError: lm-eval is not installed, or the model's tokenizer is unknown.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        text = f"lm-eval cannot be imported ({error})"
        raise UsageError(f"{text}; run pip install 'kvlab[lm-eval]'") from None
    if opened.tokenizer is None:
        raise UsageError(f"the tokenizer of {opened.name} is unknown; use a trial or gpt2")
    scorer = TextScorer(opened, load_tokenizer(opened.tokenizer), served)

    class KvlabLM(LM):  # type: ignore[misc]  # lm-eval has no types
        """Translate lm-eval's requests; see its guide to models."""

        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            part = start_part(len(requests))
            return scorer.score_continuations([request.args for request in requests], part)

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            texts = [scorer.split_text(request.args[0]) for request in requests]
            part = start_part(sum(map(len, texts)))
            return scorer.score_texts(texts, part)

        def generate_until(self, requests: Any) -> list[str]:
            return [scorer.generate(*request.args) for request in count(requests)]

    def count(requests: Any) -> Iterator[Any]:
        part = start_part(len(requests))
        for request in requests:
            yield request
            part.advance(1)

    return KvlabLM()


class TextScorer:
    """Score and generate texts with one model, through its serving cache if ``served``."""

    def __init__(self, opened: Variant, tokenizer: Tokenizer, served: bool):
        self._model, self._tokenizer = opened.model.eval(), tokenizer
        self._serving = opened.serving if served else None

    def score_continuations(
        self, texts: Sequence[tuple[str, str]], part: Part = SILENT
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether greedy decoding produces it.

        Args:
            texts: pairs of context and continuation.
            part: advanced by the continuations that are newly done.

        Raises:
            UsageError: a continuation is empty.
        """
        pairs = []
        for context, continuation in texts:  # tokenized as lm-eval does
            stripped = context.rstrip()  # the spaces belong to the continuation
            context_ids = self._tokenizer.encode(stripped) if stripped else []
            whole = self._tokenizer.encode(context + continuation)
            if len(whole) <= len(context_ids):
                text = f"continuation = {continuation!r} has no tokens of its own after"
                hint = "give the task choices that are not empty"
                raise UsageError(f"{text} {context[-40:]!r}; {hint}")
            start = context_ids or [self._tokenizer.end_of_text]
            pairs.append((start, whole[len(context_ids) :]))
        scores = score_pairs(self._model, pairs, self._serving, part)
        return [(-score.nats, score.is_greedy) for score in scores]

    def split_text(self, text: str) -> list[Pair]:
        """Return a text of any length as contexts and continuations, each token predicted once.

        The text is split into windows of block_size as lm-eval does: each but the first begins
        with the last token of the one before, and the last is filled up with preceding tokens.
        """
        block = self._model.config.block_size
        ids = [self._tokenizer.end_of_text, *self._tokenizer.encode(text)]
        pairs = []
        for start in range(0, len(ids) - 1, block):
            end = min(start + block + 1, len(ids))
            pairs.append((ids[max(0, end - block - 1) : start + 1], ids[start + 1 : end]))
        return pairs

    def score_texts(self, texts: Sequence[Sequence[Pair]], part: Part = SILENT) -> list[float]:
        """Return the log-likelihood of each text that `split_text` has split.

        All windows are scored together: alone, nearly each text would have a size of its own, for
        which a compiled step is compiled anew.

        Args:
            part: advanced by the windows that are newly done.
        """
        pairs = [pair for text in texts for pair in text]
        scores = iter(score_pairs(self._model, pairs, self._serving, part))
        return [-sum(next(scores).nats for _ in text) for text in texts]

    @torch.inference_mode()
    def generate(self, context: str, options: dict[str, Any]) -> str:
        """Return greedy text after ``context``, up to a stop text, the end of text or a length.

        Args:
            context: the prompt, shortened from its start if it is too long.
            options: lm-eval's ``until``, ``max_gen_toks`` and sampling options.

        Raises:
            UsageError: sampling is asked for, or more tokens than the model holds.
        """
        if options.get("do_sample") or options.get("temperature", 0.0):
            raise UsageError("do_sample is set, and kvlab answers tasks greedily only")
        model, tokenizer = self._model, self._tokenizer
        block, max_tokens = model.config.block_size, int(options.get("max_gen_toks", 256))
        if not 0 < max_tokens < block:
            text = f"max_gen_toks = {max_tokens} is not from 1 to {block - 1}, which leave a"
            hint = "set it in the task's generation_kwargs"
            raise UsageError(f"{text} context in model.block_size = {block}; {hint}")
        stops = options.get("until", [])
        stops = [stops] if isinstance(stops, str) else stops
        ids = (tokenizer.encode(context) or [tokenizer.end_of_text])[-(block - max_tokens) :]
        cache = model.new_cache(1, block, self._serving)
        logits = prefill(model, torch.tensor([ids], device=model.device), cache)
        step = make_decoder(model, cache)
        generated: list[int] = []
        while len(generated) < max_tokens:
            token = int(logits[0, : tokenizer.vocab_size].argmax())
            if token == tokenizer.end_of_text:
                break
            generated.append(token)
            text = tokenizer.decode(generated)
            ends = [text.index(stop) for stop in stops if stop and stop in text]
            if ends:
                return text[: min(ends)]
            logits = step(torch.tensor([token], device=model.device))
        return tokenizer.decode(generated)
