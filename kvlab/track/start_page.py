"""MLflow's app, with a page that starts with model training instead of GenAI.

MLflow's server finds it as ``--app-name kvlab``, by the entry point ``mlflow.app`` in
`pyproject.toml`. What a user chose on the page before stays.
"""

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flask import Response

APP_NAME = "kvlab"

START_VARIABLE = "KVLAB_MLFLOW_START"
"""Environment variable with the part of an address after ``#`` that the page opens at first."""

_SETTINGS = {
    "mlflow.workflowType_v1": "machine_learning",
    # Otherwise a panel for questions to a language model covers a third of the first page.
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True,
}
"""Settings that the page keeps in the browser, with their values in JSON."""

_SCRIPT = """<script>
for (const [name, value] of Object.entries(SETTINGS))
  if (localStorage.getItem(name) === null) localStorage.setItem(name, JSON.stringify(value));
if (location.hash.length < 2 && START) location.replace("#" + START);
</script>"""


def create_app() -> Any:
    """Return MLflow's ASGI app; its first page gets the settings and the start."""
    from flask import request
    from mlflow.server import app as pages
    from mlflow.server.fastapi_app import app

    def change_first_page(response: "Response") -> "Response":
        if request.path == "/" and response.mimetype == "text/html":
            response.direct_passthrough = False
            start = json.dumps(os.environ.get(START_VARIABLE, "")).replace("</", "<\\/")
            script = _SCRIPT.replace("SETTINGS", json.dumps(_SETTINGS)).replace("START", start)
            text = response.get_data(as_text=True)
            response.set_data(text.replace("<head>", f"<head>{script}", 1))
            for name in ("ETag", "Last-Modified"):  # of the page as it was
                response.headers.pop(name, None)
            response.headers["Cache-Control"] = "no-store"
        return response

    pages.after_request(change_first_page)
    return app
