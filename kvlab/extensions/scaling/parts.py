"""What trends over sizes add to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

_FOLDER = "kvlab.extensions.scaling"

PARTS = Parts(
    members={"size_trends": {"list": f"{_FOLDER}.trends:list_trends"}},
    sections=(SectionPart("size-trends", "interactions", f"{_FOLDER}.section:report_size_trends"),),
)
