"""What FineWeb-Edu adds to kvlab."""

from kvlab.own_extensions import Parts

PARTS = Parts(
    fields={"data": ".config:FineWebEduFields"},
    members={
        "sources": {
            f"fineweb-edu-{part}": f".config:PART_{part.upper()}"
            for part in ("10b", "100b", "350b", "crawl")
        }
    },
)
