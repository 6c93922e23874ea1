"""The script that draws interactive figures: Vega, Vega-Lite and Vega-Embed, out of a package."""

from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.resources import files

VEGA_LITE_VERSION = "6.4"


@cache
def bundle_vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script that sets ``vegaEmbed``.

    The bundle comes out of the package vl-convert-python and takes seconds to make, so it is kept
    in the user's cache folder.
    """
    from platformdirs import user_cache_path

    from kvlab.fs.atomic_files import write_atomic

    release = version("vl-convert-python")
    path = user_cache_path("kvlab") / f"vega-{release}-{VEGA_LITE_VERSION}.js"
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        script = _make_bundle()
    with suppress(OSError):  # else it is made again the next time
        write_atomic(path, script)
    return script


def _make_bundle() -> str:
    import vl_convert

    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE_VERSION)
    licence = (files("kvlab.report") / "page" / "VEGA_LICENSE.txt").read_text(encoding="utf-8")
    return f"/*\n{licence}*/\n(function () {{\n{script}\n}})();"
