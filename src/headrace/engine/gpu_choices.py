"""Choices of a GPU's engine that need nothing but the configuration and the machine: formats, budget."""

from __future__ import annotations

from headrace.core.block_planes import PACKED_FORMATS
from headrace.core.config import DENSE_FORMATS, PACKED, EngineConfig
from headrace.core.errors import ConfigError, DoesNotFitError
from headrace.core.model_sizes import ModelSizes
from headrace.core.model_spec import ModelSpec
from headrace.engine.choosing import Chosen, one_of
from headrace.engine.memory_plan import megabytes
from headrace.engine.vram_plan import dense_nbytes
from headrace.machine.probe import GpuInfo, Machine

# Other programs draw on the same GPU: a twentieth of what is free now is left to them.
OTHERS_SHARE = 20


def choose_dense_format(
    config: EngineConfig, spec: ModelSpec, sizes: ModelSizes, chosen: Chosen, backend: str
) -> str:
    """The type of matrices outside of experts, which they are converted to at load."""
    given = one_of("--dense-format", config.dense_format, DENSE_FORMATS)
    stored = sizes.dense_formats
    if given is not None:
        if given == PACKED and backend != "triton":
            raise ConfigError(
                f"--dense-format {PACKED} needs --backend triton, found {backend}",
                hint="leave one of them out",
                param="--dense-format",
            )
        chosen("dense_format", given, "as configured")
        return given
    if len(stored) == 1 and next(iter(stored)) in DENSE_FORMATS:
        (only,) = stored
        chosen("dense_format", only, "as stored")
        return only
    blocks = sorted(stored & PACKED_FORMATS)
    if blocks and backend == "triton":
        now = [n / 1e6 for n in (sizes.packed_nbytes, dense_nbytes(spec, "bf16"))]
        chosen(
            "dense_format",
            PACKED,
            f"stored as {', '.join(sorted(stored))}: multiplied as they are, {now[0]:,.0f} MB; "
            f"{now[1]:,.0f} MB in bf16",
        )
        return PACKED
    # float16 has finer steps, but a feed-forward's inner values can exceed its 65,504.
    mb = [n / 1e6 for n in (sizes.total_nbytes - sizes.expert_nbytes, dense_nbytes(spec, "bf16"))]
    reason = f"has float32's range on tensor cores; {mb[0]:,.0f} MB become {mb[1]:,.0f} MB at load"
    chosen("dense_format", "bf16", f"stored as {', '.join(sorted(stored))}: {reason}")
    return "bf16"


def vram_budget(config: EngineConfig, gpu: GpuInfo, chosen: Chosen) -> int:
    """Bytes of GPU memory that this process may use, the driver's own for it included."""
    if config.vram_budget_nbytes is None:
        budget = gpu.memory_free_nbytes - gpu.memory_free_nbytes // OTHERS_SHARE
        chosen(
            "vram_budget", megabytes(budget), f"what is free now, less 1/{OTHERS_SHARE} for others"
        )
        return budget
    if config.vram_budget_nbytes > gpu.memory_total_nbytes:
        raise ConfigError(
            f"--vram-budget is {megabytes(config.vram_budget_nbytes)}; {gpu.name} has "
            f"{megabytes(gpu.memory_total_nbytes)}",
            hint="give less, or leave it out",
            param="--vram-budget",
        )
    if config.vram_budget_nbytes > gpu.memory_free_nbytes:
        raise DoesNotFitError(
            f"--vram-budget is {megabytes(config.vram_budget_nbytes)}; other programs leave "
            f"{megabytes(gpu.memory_free_nbytes)} of {gpu.name}",
            hint="give less, or end them",
        )
    chosen("vram_budget", megabytes(config.vram_budget_nbytes), "as configured")
    return config.vram_budget_nbytes


def vram_warnings(machine: Machine, gpu: GpuInfo, planned_nbytes: int) -> tuple[str, ...]:
    """What little free GPU memory means: with a driver that moves memory to the host instead of failing."""
    spare = gpu.memory_free_nbytes - planned_nbytes
    if spare >= gpu.memory_free_nbytes // (2 * OTHERS_SHARE):
        return ()
    then = "they fail, or this one does"
    if machine.wsl or machine.system.startswith("Windows"):
        then = (
            "the driver moves some of ours to host memory, without an error and many times slower"
        )
    return (
        f"little GPU memory is left: {megabytes(spare)} of {megabytes(gpu.memory_free_nbytes)} that were "
        f"free; when other programs take more, {then}",
    )
