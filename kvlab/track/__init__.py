"""MLflow, a projection of the record. The only package that imports mlflow, and only when used."""

from kvlab.track.connection import is_server, tracking_uri
from kvlab.track.reading import fetch_record
from kvlab.track.server import serve_ui
from kvlab.track.tracker import Mirrored, Tracker

__all__ = ["Mirrored", "Tracker", "fetch_record", "is_server", "serve_ui", "tracking_uri"]
