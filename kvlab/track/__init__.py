"""Mirror the record into MLflow. The only package that imports mlflow, and only when used."""

from kvlab.track.fetch import fetch_record
from kvlab.track.tracker import Tracker

__all__ = ["Tracker", "fetch_record"]
