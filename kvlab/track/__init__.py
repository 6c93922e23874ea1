"""Mirror the record into MLflow. The only package that imports mlflow, and only when used."""

from kvlab.track.connection import is_server, serve_ui, tracking_uri
from kvlab.track.fetch import fetch_record
from kvlab.track.sweep_summary import view_address
from kvlab.track.tracker import MirrorSummary, Tracker

__all__ = [
    "MirrorSummary",
    "Tracker",
    "fetch_record",
    "is_server",
    "serve_ui",
    "tracking_uri",
    "view_address",
]
