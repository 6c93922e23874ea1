"""Sweeps: what to run, where, and what to do when it fails. Importing needs no torch and no ray."""

from kvlab.sweep.driver.driver import Driver
from kvlab.sweep.driver.sweep_progress import Event, Summary
from kvlab.sweep.planning.planner import Plan, PlannedTrial, Stage, plan
from kvlab.sweep.planning.stages import plan_stage

__all__ = ["Driver", "Event", "Plan", "PlannedTrial", "Stage", "Summary", "plan", "plan_stage"]
