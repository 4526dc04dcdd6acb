"""What a GPU could do at best, from the catalogue of published peaks: to set measured rates beside it."""

from __future__ import annotations

from headrace.machine.known import parts
from headrace.machine.profile import GpuProfile


def published_peaks(gpu: GpuProfile) -> dict[str, float]:
    """Peaks by the profile's names of rates and in their units; empty for a chip that is not listed.

    A chip is the listed one whose title begins with the driver's name for it and that has as many
    multiprocessors: cut-down and laptop variants share names.
    """
    for part in parts().values():
        same = part.title == gpu.name or part.title.startswith(gpu.name + " ")
        if part.kind == "gpu" and same and part.raw.get("sms") == gpu.multiprocessors:
            found = {
                f"gpu_flops_{rate}": 1e3 * value  # TFLOP/s there
                for rate, (value, _) in part.rates.items()
                if rate not in ("hbm_read", "link")
            }
            if "gpu_flops_bf16" in found:
                found["gpu_flops_f16"] = found["gpu_flops_bf16"]
            return found | {"hbm_read": part.rates["hbm_read"][0]}
    return {}
