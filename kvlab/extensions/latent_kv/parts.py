"""What latent K/V adds to kvlab."""

from kvlab.own_extensions import Parts

_FOLDER = "kvlab.extensions.latent_kv"
_CODE = tuple(f"{_FOLDER}.{name}" for name in ("arithmetic", "view"))

PARTS = Parts(
    members={
        "mapped_kv_forms": {"latent": f"{_FOLDER}.arithmetic:LatentKV"},
        "presets": {
            "deepseek-v2-lite": f"{_FOLDER}.presets:DEEPSEEK_V2_LITE",
            "deepseek-v3": f"{_FOLDER}.presets:DEEPSEEK_V3",
        },
        "preset_notes": dict.fromkeys(
            ("deepseek-v2-lite", "deepseek-v3"), "kvlab.spec.presets:ACTIVE_EXPERTS"
        ),
    },
    training_code=_CODE,
    measurement_code=_CODE,
)
