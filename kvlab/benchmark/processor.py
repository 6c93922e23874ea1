"""The processor's name. Imports no torch."""

import platform


def processor_name() -> str:
    """The processor's model, as its maker calls it, else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.machine()
