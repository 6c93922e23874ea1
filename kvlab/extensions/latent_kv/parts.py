"""What latent K/V adds to kvlab."""

from kvlab.own_extensions import Parts

_CODE = (".arithmetic", ".view")

PARTS = Parts(
    members={
        "mapped_kv_forms": {"latent": ".arithmetic:LatentKV"},
        "presets": {
            "deepseek-v2-lite": ".presets:DEEPSEEK_V2_LITE",
            "deepseek-v3": ".presets:DEEPSEEK_V3",
        },
        "preset_notes": dict.fromkeys(
            ("deepseek-v2-lite", "deepseek-v3"), "kvlab.spec.presets:ACTIVE_EXPERTS"
        ),
    },
    training_code=_CODE,
    measurement_code=_CODE,
)
