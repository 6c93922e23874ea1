"""What trends over sizes add to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

PARTS = Parts(
    members={"size_trends": {"list": ".trends:list_trends"}},
    sections=(SectionPart("size-trends", "interactions", ".section:report_size_trends"),),
)
