"""What FineWeb-Edu adds to kvlab."""

from kvlab.own_extensions import Parts

_FOLDER = "kvlab.extensions.fineweb_edu"

PARTS = Parts(
    fields={"data": f"{_FOLDER}.config:FineWebEduFields"},
    members={
        "sources": {
            f"fineweb-edu-{part}": f"{_FOLDER}.config:PART_{part.upper()}"
            for part in ("10b", "100b", "350b", "crawl")
        },
    },
)
