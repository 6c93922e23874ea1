"""A search: suggestions become cells, trials and results, and the history is kept on disk.

Each suggestion is a level of one factor, ``point``, whose baseline is the base experiment. So a
search is recorded and mirrored like any sweep. `Store.sweep` returns under ``search`` what its
report needs besides the results; `kvlab.analysis.search_results` reads it.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

from pydantic import ValidationError

from kvlab.analysis.search_results import SearchResults
from kvlab.errors import SpecError, StoreError, UsageError
from kvlab.extensions.search import history as histories
from kvlab.extensions.search import optuna_sampler as sampler
from kvlab.extensions.search import summary
from kvlab.extensions.search.history import Suggestion
from kvlab.extensions.search.pruner import Pruner
from kvlab.fs.sealed_files import write_sealed_json
from kvlab.humanize import summarize_error
from kvlab.spec.experiment import Experiment
from kvlab.spec.overrides import apply_patch
from kvlab.spec.search_config import format_settings
from kvlab.spec.sweep import SEARCH_FACTOR, Cell
from kvlab.spec.validation_errors import list_field_errors
from kvlab.store import Store
from kvlab.store.store_paths import POINTS_FOLDER, format_level
from kvlab.sweep.planning.planner import Plan, PlannedTrial, Stage, SweepPlanner
from kvlab.sweep.planning.texts import IdentifyDataset

MAX_FRUITLESS_SUGGESTIONS = 200
"""Suggestions in a row without a new trial after which the space counts as exhausted."""

BEYOND_LIMIT = "is beyond a limit"
"""Why a suggestion is not trained that violates a limit on what is known beforehand."""

MIN_IMPORTANCE_TRIALS = 10
"""Measured trials below which no importance of a parameter is estimated."""


class Searcher:
    """Supply the driver with suggested trials, and learn from how they end.

    It is a `kvlab.sweep.driver.sweep_progress.TrialSource`.

    Args:
        describe: Returns the content of ``sweep.json`` for a stage.

    Attributes:
        plan: The base experiment and all suggestions that have a trial.
        stop_reason: Why no more suggestions are made; empty as long as they are.

    Raises:
        SpecError: As `check_search`.
        RecordDamaged: The history on disk is damaged; `kvlab.store.verification.heal` comes first.
        StoreError: The history on disk is of another search.
    """

    def __init__(
        self,
        base: Plan,
        store: Store,
        describe: Callable[[Stage], dict[str, Any]],
        identify: IdentifyDataset | None = None,
    ):
        assert base.sweep.search is not None, "only for sweeps with a search"
        sampler.check_search(base.sweep)
        self._config, self._store = base.sweep.search, store
        self._directions = [sampler.objective_direction(name) for name in self._config.objectives]
        named = (replace(planned, name="base experiment") for planned in base.trials)
        self.plan = self._base = replace(base, trials=tuple(named))
        self._describe, self._identify = describe, identify
        self._directory = store.sweep_directory(base.sweep.name)
        self._points = store.search_points(base.sweep.name)
        history = histories.load_history(self._directory, self._points, self._config)
        self.suggestions, self._seconds_before = history
        self._pruner = Pruner(self._config.pruning, self.suggestions)
        self._started, self._saved_seconds = time.monotonic(), self._seconds_before
        self._importances: dict[str, dict[str, float]] = {}
        self.stop_reason = ""
        self._to_resume = [suggestion for suggestion in self.suggestions if suggestion.is_open]
        for suggestion in self.suggestions:
            if suggestion.trial_id:
                self._restore(suggestion)

    @property
    def flops(self) -> float:
        """Training FLOPs spent so far, with those of what runs now."""
        return self._pruner.spent_flops()

    @property
    def seconds(self) -> float:
        """Time spent searching, over all runs."""
        return self._seconds_before + time.monotonic() - self._started

    @property
    def stage(self) -> Stage:
        """The one stage of a search, with what ``sweep.json`` keeps of it.

        The suggestions lie in files of their own, and `Store.sweep` adds them.
        """
        record = {
            **self._config.model_dump(mode="json"),
            "directions": self._directions,
            "stop_reason": self.stop_reason,
            "spent_flops": self.flops,
            "spent_seconds": self._saved_seconds,
            "importances": self._importances,
        }
        return Stage(self._base, record={"search": record})

    def finish(self) -> Iterator[str]:
        """Estimate the importance of every parameter, and record how the search has ended.

        Returns:
            Lines that say what it has found.
        """
        measured = [s.observation for s in self.suggestions if s.has_trial and s.observation.values]
        if len(measured) >= MIN_IMPORTANCE_TRIALS:
            self._importances = sampler.estimate_importances(
                self._config, self._directions, measured
            )
        self._store.write_sweep(self._describe(self.stage))
        results = SearchResults(self._store.sweep(self.plan.sweep.name)["search"])
        return summary.describe_end(results, self.plan.sweep)

    def promote(self, trial_id: str) -> None:
        """Let a pruned trial be trained to its end, because a person wants it."""
        suggestion = self._find(trial_id)
        if suggestion is None or not suggestion.is_pruned:
            name = self.plan.sweep.name
            text = f"--promote = {trial_id} is no pruned trial of {name}"
            raise UsageError(f"{text}; see `kvlab status {name}`")
        suggestion.is_promoted = True
        self._reopen(suggestion)
        self._to_resume.append(suggestion)

    # What the driver calls

    def ask(self) -> PlannedTrial | None:
        """Return the trial of the next suggestion, or one that was pruned and goes on after all.

        Returns:
            None while enough trials run, or at the end (see ``stop_reason``).

        Raises:
            SpecError: No suggestion so far keeps the limits on what is known before a trial runs.
        """
        if self._to_resume:
            return self._with_pause_step(self._to_resume.pop(0))
        open_trials = {suggestion.trial_id for suggestion in self.suggestions if suggestion.is_open}
        if len(open_trials) >= self._config.parallel:
            return None
        trials = sum(suggestion.has_trial for suggestion in self.suggestions)
        if self._config.trials is not None and trials >= self._config.trials:
            self.stop_reason = f"{trials:,} trials are the budget"
        is_over = self._is_budget_spent() or bool(self.stop_reason)
        promoted = self._promote_next(is_last=is_over and not open_trials)
        if promoted is not None or is_over:
            return promoted
        for _ in range(MAX_FRUITLESS_SUGGESTIONS):
            planned = self._suggest()
            if planned is not None:
                return planned
        beyond = [s for s in self.suggestions if s.skip_reason == BEYOND_LIMIT]
        if beyond and not trials:
            self._refuse_limits(beyond)
        last = self.suggestions[-1].skip_reason
        text = f"the last {MAX_FRUITLESS_SUGGESTIONS} suggestions led to nothing new"
        self.stop_reason = f"{text}; the last one {last}"
        return self._promote_next(is_last=not open_trials)

    def tell(self, planned: PlannedTrial, status: str) -> None:
        """Take how a trial ended, and note its objectives."""
        result = (self._store.result(planned.trial.id) or {}) if status == "done" else {}
        metrics = {**sampler.planned_metrics(planned), **result.get("measurements", {})}
        ended = [s for s in self.suggestions if s.trial_id == planned.trial.id and s.is_open]
        needed = (*self._config.objectives, *self._config.limits)
        for observation in (suggestion.observation for suggestion in ended):
            if status == "diverged":
                observation.state, observation.violations = "beyond", {"diverged": 1.0}
            elif status != "done" or any(n not in metrics for n in needed):
                observation.state = "lost"
            else:
                observation.values = [float(metrics[n]) for n in self._config.objectives]
                observation.violations = sampler.limit_violations(self._config.limits, metrics)
                is_beyond = any(violation > 0 for violation in observation.violations.values())
                observation.state = "beyond" if is_beyond else "ok"
        self._save(*ended)

    def resume_or_prune(self, planned: PlannedTrial) -> PlannedTrial | None:
        """Decide about a trial at its rung."""
        suggestion = self._find(planned.trial.id)
        if suggestion is None or not suggestion.is_open:
            return None  # it was decided before a kill, and that was not recorded
        step = self._pruner.pause_step(suggestion)
        loss = self._store.rungs(suggestion.training_id).get(step or 0)
        if loss is None:
            text = f"training {suggestion.training_id} has paused, and its rungs.json has no step"
            raise StoreError(f"{text} {step}; submit again to train to the rung again")
        rung_losses = [*suggestion.observation.rung_losses, loss]
        paused = self._same_trial(suggestion)
        for same in paused:
            same.observation.state, same.observation.rung_losses = "pruned", rung_losses
        if self._is_budget_spent() or not self._pruner.should_continue(suggestion):
            self._save(*paused)
            return None
        return self._reopen(suggestion)

    # Suggest

    def _suggest(self) -> PlannedTrial | None:
        """Make a suggestion; return its trial, or None if it has none of its own."""
        history = [suggestion.observation for suggestion in self.suggestions]
        observation = sampler.suggest_params(self._config, self._directions, history)
        patch = {
            key: self._config.choices[key][value] if key in self._config.choices else value
            for key, value in observation.params.items()
        }
        suggestion = Suggestion(observation, format_level(len(self.suggestions) + 1), patch)
        self.suggestions.append(suggestion)
        planned = self._plan_suggestion(suggestion)
        if planned is not None:
            metrics = sampler.planned_metrics(planned.trials[0])
            observation.violations = sampler.limit_violations(self._config.limits, metrics)
            if any(violation > 0 for violation in observation.violations.values()):
                observation.state, suggestion.skip_reason = "beyond", BEYOND_LIMIT
            else:
                self._add_to_plan(suggestion, planned)
        earlier = self._find(suggestion.trial_id)
        if earlier is not None and earlier is not suggestion:
            suggestion.skip_reason = f"computes the same as {earlier.level}"
            if not earlier.is_open:
                params, attrs = observation.params, observation.sampler_attrs
                past = replace(earlier.observation, params=params, sampler_attrs=attrs)
                suggestion.observation = past
        self._save(suggestion)
        return self._with_pause_step(suggestion) if suggestion.has_trial else None

    def _refuse_limits(self, beyond: list[Suggestion]) -> NoReturn:
        """Raise SpecError at the limit that the closest of suggestions is beyond.

        The history is removed, so that the search may begin anew with another limit.
        """
        closest = min(beyond, key=lambda s: max(s.observation.violations.values()))
        broken, excess = max(closest.observation.violations.items(), key=lambda one: one[1])
        name, sign = broken.split()
        key = "at_most" if sign == "+1" else "at_least"
        bound = getattr(self._config.limits[name], key)
        value = bound + int(sign) * excess * (abs(bound) or 1.0)
        text = f"search.limits.{name}.{key} = {bound:,.0f} is kept by none of"
        text = f"{text} {len(self.suggestions)} suggestions; the closest has {value:,.0f}"
        text = f"{text} ({format_settings(closest.patch)}); change it, or widen the space"
        (self._directory / histories.HISTORY_FILE).unlink()
        shutil.rmtree(self._directory / POINTS_FOLDER)
        document = self.plan.sweep.source.document
        raise SpecError([document.problem(("search", "limits", name, key), text)])

    def _plan_suggestion(self, suggestion: Suggestion) -> Plan | None:
        """Plan one suggestion, as a new level of the search's factor; None if it is impossible."""
        sweep = self.plan.sweep
        levels = {**sweep.factors[SEARCH_FACTOR], suggestion.level: suggestion.patch}
        factors = {**sweep.factors, SEARCH_FACTOR: levels}
        sweep = sweep.model_copy(update={"factors": factors})
        data = apply_patch(sweep.source.base, sweep.patch(SEARCH_FACTOR, suggestion.level))
        try:
            experiment = Experiment.model_validate(data)
            cell = Cell({SEARCH_FACTOR: suggestion.level}, experiment, sweep.all_seeds)
            return SweepPlanner(sweep, self._store, self._identify).plan((cell,))
        except SpecError as error:
            reason = summarize_error(error)
        except ValidationError as error:
            reason = list_field_errors(error, Experiment, data)[0].message
        observation = suggestion.observation
        observation.state, observation.violations = "beyond", {"possible": 1.0}
        suggestion.skip_reason = f"is not possible: {reason}"
        return None

    def _add_to_plan(self, suggestion: Suggestion, planned: Plan) -> None:
        """Add a planned suggestion to the plan, and note its trial."""
        trial = replace(planned.trials[0], name=format_settings(suggestion.patch))
        suggestion.trial_id, suggestion.training_id = trial.trial.id, trial.trial.training_id
        suggestion.flops, suggestion.steps = trial.flops, trial.trial.experiment.training.steps
        suggestion.cell = planned.cells[0].to_json()
        is_new = not any(one.trial.id == trial.trial.id for one in self.plan.trials)
        trials = (*self.plan.trials, trial) if is_new else self.plan.trials
        cells = (*self.plan.cells, *planned.cells)
        self.plan = replace(self.plan, sweep=planned.sweep, trials=trials, cells=cells)

    def _restore(self, suggestion: Suggestion) -> None:
        """Plan a suggestion of the history again."""
        planned = self._plan_suggestion(suggestion)
        if planned is None or planned.trials[0].trial.id != suggestion.trial_id:
            text = f"{self._directory}: {suggestion.level} is no longer what was run; its base or"
            raise StoreError(f"{text} its text has changed; give the sweep another name")
        self._add_to_plan(suggestion, planned)
        self._with_pause_step(suggestion)

    # Go on

    def _promote_next(self, *, is_last: bool) -> PlannedTrial | None:
        """Let a pruned trial go on after all, if one may.

        Args:
            is_last: No more suggestions come, and nothing runs.
        """
        suggestion = None
        if not self._is_budget_spent():
            suggestion = self._pruner.find_promotable(is_last=is_last)
        if suggestion is None and is_last:
            suggestion = self._pruner.find_furthest()
        return None if suggestion is None else self._reopen(suggestion)

    def _reopen(self, suggestion: Suggestion) -> PlannedTrial:
        """Let a pruned suggestion go on, to its next rung."""
        reopened = self._same_trial(suggestion)
        for same in reopened:
            same.observation.state = "open"
            same.observation.rung_losses = suggestion.observation.rung_losses
        self._save(*reopened)
        return self._with_pause_step(suggestion)

    def _with_pause_step(self, suggestion: Suggestion) -> PlannedTrial:
        """Return the trial with the step at which it is to pause, here and in the plan."""
        planned = next(p for p in self.plan.trials if p.trial.id == suggestion.trial_id)
        until = self._pruner.pause_step(suggestion)
        paused = replace(planned, trial=replace(planned.trial, until=until))
        trials = tuple(paused if one is planned else one for one in self.plan.trials)
        self.plan = replace(self.plan, trials=trials)
        return paused

    def _find(self, trial_id: str) -> Suggestion | None:
        return next((s for s in self.suggestions if s.trial_id == trial_id and s.has_trial), None)

    def _same_trial(self, suggestion: Suggestion) -> list[Suggestion]:
        """Return the suggestions with the same trial that wait or run, itself included."""
        same = (s for s in self.suggestions if s.trial_id == suggestion.trial_id)
        return [s for s in same if s.is_open or s.is_pruned]

    # The end

    def _is_budget_spent(self) -> bool:
        """Return whether FLOPs or hours are used up, so that nothing is promoted either."""
        config = self._config
        if config.flops is not None and self.flops >= config.flops:
            self.stop_reason = f"{self.flops:.3g} of {config.flops:.3g} training FLOPs are spent"
            return True
        if config.hours is not None and self.seconds >= 3600 * config.hours:
            self.stop_reason = f"{config.hours:g} hours are over"
            return True
        return False

    def _save(self, *changed: Suggestion) -> None:
        """Write the suggestions that have changed, and what was spent."""
        self._saved_seconds = self.seconds
        content = {"schema": 2, "search": histories.search_identity(self._config)}
        content |= {"seconds": self._saved_seconds, "flops": self.flops}
        write_sealed_json(self._directory / histories.HISTORY_FILE, content)
        for suggestion in changed:
            self._points.write(suggestion.to_json())
