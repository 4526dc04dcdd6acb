"""The choices of an engine whose model runs on a GPU. Plain Python, decided once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from headrace.core.config import PACKED, EngineConfig
from headrace.core.errors import ConfigError, DoesNotFitError
from headrace.core.kv_formats import DEFAULT_ON_GPU
from headrace.core.model_sizes import ModelSizes
from headrace.core.model_spec import ModelSpec
from headrace.core.status import Choice
from headrace.core.weight_shapes import num_parameters
from headrace.engine.choosing import (
    Chosen,
    batch_limits,
    choose_block_tokens,
    choose_context,
    choose_pool,
    host_budget,
    require_expert_store,
    why,
)
from headrace.engine.chunk_tokens import StreamedModel, choose_chunk_tokens
from headrace.engine.expert_rates import STEP_TOKENS, automatic_placement
from headrace.engine.gpu_choices import choose_dense_format, vram_budget, vram_warnings
from headrace.engine.kv_choice import KVPool, KVSupport, choose_kv
from headrace.engine.memory_plan import RESERVE_NBYTES, MemoryPlan, megabytes
from headrace.engine.resolved import GpuSupport, Resolved
from headrace.engine.vram_plan import (
    ELEMENT_NBYTES,
    VramPlan,
    Workspace,
    dense_nbytes,
    graphs_nbytes,
)
from headrace.engine.vram_room import GpuRoom
from headrace.experts.chunk_choice import ChunkChoice
from headrace.experts.model_layout import ExpertKind, model_layouts, widest
from headrace.experts.placement import Placement, most_fetched
from headrace.experts.slab import SlabLayout
from headrace.machine.probe import Machine
from headrace.machine.threads import choose_threads, cpus_apart

# Tokens of a step: enough rows for the tensor cores to be busy (an H200 multiplies 2,048 rows in about
# the time that it takes to read the weights of 400), and experts that are streamed in for a chunk serve
# more of its tokens.
DEFAULT_MAX_BATCH_TOKENS = 2048
# Where every expert is in GPU memory, half of what is left serves as KV cache, the rest stays free for
# the system. Where experts compete for it, KV gets a quarter and slots the rest.
KV_SHARE, KV_SHARE_BESIDE_SLOTS = 2, 4
# "All experts fit" means: beside a context of at least this many tokens (or the model's own).
USEFUL_CONTEXT = 8192
# Host buffers of a step: pinned inputs, logits that are sampled on the host.
_HOST_WORKSPACE_NBYTES = 64 * 2**20


def resolve_on_gpu(
    config: EngineConfig,
    spec: ModelSpec,
    machine: Machine,
    sizes: ModelSizes,
    support: GpuSupport,
    kv_support: KVSupport,
) -> Resolved:
    """Choose everything for the first GPU.

    Raises:
        ConfigError: a value is not possible here, or two contradict each other.
        DoesNotFitError: the model does not fit the GPU's memory (or its experts the host's).
    """
    choices: list[Choice] = []

    def chosen(name: str, value: object, reason: str) -> None:
        choices.append(Choice(name, str(value), reason))

    gpu = machine.gpus[0]
    chosen("device", "cuda", why(None if config.device == "auto" else 1, f"{gpu.name} is there"))
    backend = config.backend or "triton"
    chosen("backend", backend, why(config.backend, "the kernels for CUDA GPUs"))
    # The host loop needs a core: without one both paths halve (docs/LOG.md, 2026-11-29).
    threads = choose_threads(
        machine.cpu, config.threads, reserve=1, measured=machine.measured_threads
    )
    chosen("threads", threads.threads, threads.reason)
    dense = choose_dense_format(config, spec, sizes, chosen, backend)
    default = (DEFAULT_ON_GPU, "what tensor cores multiply")
    if dense == "f32":
        default = ("f32", "as the matrices")
    kv = choose_kv(config, spec, kv_support, backend, default, chosen)
    block_tokens = choose_block_tokens(config, chosen, sealed=kv.format.sealed)
    seqs, batch = batch_limits(
        config, DEFAULT_MAX_BATCH_TOKENS, "enough rows to keep the tensor cores busy", chosen
    )
    budget = vram_budget(config, gpu, chosen)
    workspace = Workspace(
        spec, batch, seqs, dense == PACKED, block_tokens if kv.format.centred else 0
    )

    empty = VramPlan(
        weights_nbytes=sizes.packed_nbytes if dense == PACKED else dense_nbytes(spec, dense),
        kv_nbytes=0,
        workspace_nbytes=0,
        graphs_nbytes=graphs_nbytes(spec, max_num_seqs=seqs),
        experts_nbytes=0,
        budget_nbytes=budget,
    )
    room = GpuRoom(spec, KVPool(spec, kv, block_tokens, seqs, batch), block_tokens, empty)
    placed = _place_experts(config, spec, sizes, support, room, workspace, dense)
    streams = placed.layout is not None and placed.mode in ("stream", "hybrid")
    workspace = replace(workspace, streamed=streams, wide=not sizes.have_grouped_kernels)
    chunks = _choose_chunks(config, spec, support, placed, workspace)
    if chunks is not None:
        batch = max(chunks.tokens, seqs)
        workspace = replace(workspace, batch=batch)
        room, placed = room.with_batch(batch), replace(placed, room=placed.room.with_batch(batch))
        choices[:] = [one for one in choices if one.name != "max_batch_tokens"]
        chosen("max_batch_tokens", batch, chunks.reason)
    chosen("experts", placed.mode, placed.reason)
    require_expert_store(config, None if placed.layout else placed.reason)
    context = choose_context(config, spec, placed.room, workspace, chosen)
    num_blocks = choose_pool(
        config,
        placed.room,
        context=context,
        seqs=seqs,
        workspace=workspace(context),
        share=placed.kv_share,
        chosen=chosen,
    )
    # Padding rows of captured steps write into one block more.
    tokens = (num_blocks + 1) * block_tokens
    bare = room.with_experts(placed.nbytes).plan(tokens, workspace(context))
    vram = _with_slots(placed, bare, config.expert_slots, min(seqs, STEP_TOKENS))
    vram.require_fit("give a smaller --context or a larger --vram-budget, or --experts hybrid")
    if placed.layout is not None:
        _record_slots(placed.layout, vram, sizes, config.expert_slots, chosen)
    chosen("vram", megabytes(vram.total_nbytes), vram.describe())
    plan = MemoryPlan(
        weights_nbytes=sizes.expert_nbytes if placed.mode != "gpu" else 0,
        kv_nbytes=0,
        workspace_nbytes=_HOST_WORKSPACE_NBYTES,
        reserve_nbytes=RESERVE_NBYTES,
        budget_nbytes=host_budget(config, machine, chosen),
    )
    if placed.mode != "gpu" and config.expert_disk is None:
        plan.require_fit(
            "the experts must fit the host's memory; choose a smaller model or format, or name a "
            "folder on a fast disk with --expert-disk"
        )
    chosen("memory", megabytes(plan.total_nbytes), plan.describe())
    return Resolved(
        context=context,
        kv_format=kv.format.name,
        kv_pool=room.pool.shape(num_blocks + 1),
        kv_rank=kv.rank,
        kv_key=kv.key,
        block_tokens=block_tokens,
        max_batch_tokens=batch,
        max_num_seqs=seqs,
        num_blocks=num_blocks,
        threads=threads.threads,
        backend=backend,
        experts=placed.mode,
        plan=plan,
        choices=tuple(choices),
        warnings=(
            *kv.warnings,
            *threads.warnings,
            *vram_warnings(machine, gpu, vram.total_nbytes),
        ),
        device="cuda",
        gpu_index=gpu.index,
        dense_format=dense,
        slots=placed.layout is not None,
        vram=vram,
        expert_ram_nbytes=max(0, plan.headroom_nbytes + plan.weights_nbytes),
        pin_budget_nbytes=config.pin_budget_nbytes,
        expert_disk=config.expert_disk,
        expert_cpus=cpus_apart(machine.cpu, threads.threads),
        chunks=chunks,
    )


def _choose_chunks(
    config: EngineConfig,
    spec: ModelSpec,
    support: GpuSupport,
    placed: _Placed,
    workspace: Workspace,
) -> ChunkChoice | None:
    """How prompts are cut; None where nothing is streamed, or the user says how many tokens a step has."""
    layout = placed.layout
    if config.max_batch_tokens is not None or layout is None or not workspace.streamed:
        return None
    context = config.context or min(spec.max_context, USEFUL_CONTEXT)

    def slots_nbytes(tokens: int) -> int:
        nbytes = replace(workspace, batch=tokens)(context)
        left = placed.room.with_batch(tokens).plan(context, nbytes).headroom_nbytes
        left -= max(left, 0) // KV_SHARE_BESIDE_SLOTS
        if config.expert_slots is None:
            return left
        # As many as are asked for, or the (negative) bytes that are missing.
        transit = _transit(placed, layout, min(workspace.seqs, STEP_TOKENS))
        missing = (config.expert_slots + transit) * layout.slice_nbytes - left
        return -missing if missing > 0 else config.expert_slots * layout.slice_nbytes

    return choose_chunk_tokens(
        StreamedModel(spec, layout, placed.mode, support.known),
        slots_nbytes,
        lambda tokens: replace(workspace, batch=tokens)(context),
        config.context or spec.max_context,
    )


@dataclass(frozen=True)
class _Placed:
    """Where experts go. nbytes: of experts that do not lie in slots; layout: of those that do."""

    mode: str
    reason: str
    room: GpuRoom
    kv_share: int
    nbytes: int = 0
    layout: SlabLayout | None = None


def _place_experts(
    config: EngineConfig,
    spec: ModelSpec,
    sizes: ModelSizes,
    support: GpuSupport,
    room: GpuRoom,
    workspace: Callable[[int], int],
    dense: str,
) -> _Placed:
    moe = spec.moe
    if moe is None:
        if config.experts in ("stream", "hybrid"):
            raise ConfigError(
                f"--experts {config.experts}: the model has no experts",
                hint="leave it out",
                param="--experts",
            )
        return _Placed("gpu", "the model has no experts", room, KV_SHARE)
    layout = _slots_of(spec, sizes, support)
    if layout is not None:
        mixtures = sum(layer.moe for layer in spec.layers)
        everything = mixtures * moe.num_experts * layout.slab_nbytes
    else:
        everything = num_parameters(spec).experts * ELEMENT_NBYTES.get(dense, 2)  # packed: bfloat16
    context = config.context or min(spec.max_context, USEFUL_CONTEXT)
    whole = room.with_experts(everything)
    plan = whole.plan(context, workspace(context))
    fits = plan.headroom_nbytes >= 0
    inside = _Placed("gpu", "", whole, KV_SHARE, 0 if layout else everything, layout)
    if config.experts == "gpu":
        plan.require_fit("leave --experts gpu out, or give a larger --vram-budget")
        return replace(inside, reason="as configured")
    if config.experts == "auto" and fits and config.expert_slots is None:
        return replace(inside, reason=f"all of them ({everything / 1e6:,.0f} MB) fit")
    if layout is None:
        found = ", ".join(sorted(sizes.expert_formats)) or "none"
        known = ", ".join(sorted(support.expert_formats)) or "none"
        problem = (
            f"experts of {everything / 1e6:,.0f} MB do not fit the GPU ({plan.describe()}), and the "
            f"expert cache cannot hold them: their format is {found} (gate and up of a layer must be "
            f"alike), it serves {known}"
        )
        raise DoesNotFitError(
            problem, hint="give a larger --vram-budget, a smaller model, or --device cpu"
        )
    shared = replace(room, share=KV_SHARE_BESIDE_SLOTS)
    mode, reason = config.experts, "as configured"
    if mode == "auto":
        left, why_not_all = everything + plan.headroom_nbytes, "--expert-slots limits them"
        if config.expert_slots is not None:
            left = config.expert_slots * layout.slice_nbytes
        else:
            missing = f"{-plan.headroom_nbytes / 1e6:,.0f} MB"
            why_not_all = f"{missing} are missing to hold all of them"
        mode, reason = _fastest(spec, layout, left, support)
        reason = f"{why_not_all}; {reason}"
    return _Placed(mode, reason, shared, KV_SHARE_BESIDE_SLOTS, 0, layout)


def _fastest(
    spec: ModelSpec, layout: SlabLayout, slots_nbytes: int, support: GpuSupport
) -> tuple[str, str]:
    """The placement of experts that do not all fit, and why."""
    choice = automatic_placement(spec, layout, slots_nbytes, support.known)
    if choice is None:
        return "hybrid", "the rates of PCIe and of the CPU are not known yet"
    return choice.placement, choice.reason


def _slots_of(spec: ModelSpec, sizes: ModelSizes, support: GpuSupport) -> SlabLayout | None:
    """How the experts lie in slots; None if the expert cache does not serve their formats."""
    moe, formats = spec.moe, sizes.expert_formats
    if moe is None or not formats or not formats <= support.expert_formats:
        return None
    kinds = [ExpertKind(*kind) for kind in sizes.expert_kinds]
    if not kinds and len(formats) == 1:
        (fmt,) = formats
        kinds = [ExpertKind(fmt, fmt)]
    if not kinds:
        return None
    try:
        return widest(model_layouts(kinds, spec.hidden, moe.intermediate, has_bias=moe.expert_bias))
    except ConfigError:  # its dimensions are not whole blocks
        return None


def _with_slots(placed: _Placed, plan: VramPlan, slots: int | None, step_tokens: int) -> VramPlan:
    """Give the slots what the rest leaves, up to all experts, or as many as are asked for.

    Raises:
        ConfigError: slots are asked for, and the placement has none to choose.
        DoesNotFitError: more are asked for than there is room for.
    """
    layout, moe = placed.layout, placed.room.spec.moe
    if layout is None or moe is None:
        return plan
    mixtures = sum(layer.moe for layer in placed.room.spec.layers)
    everything = mixtures * moe.num_experts * layout.slab_nbytes
    if placed.mode in ("cpu", "gpu"):
        if slots is not None:
            raise ConfigError(
                f"--expert-slots is {slots}, but experts are placed on the {placed.mode.upper()}: "
                f"{placed.reason}",
                hint="choose --experts hybrid or stream, or leave --expert-slots out",
                param="--expert-slots",
            )
        return replace(plan, experts_nbytes=everything if placed.mode == "gpu" else 0)
    size = layout.slice_nbytes
    room = max(plan.headroom_nbytes, 0) // size * size
    if slots is not None:
        transit = _transit(placed, layout, step_tokens)
        if (slots + transit) * size > room:
            raise DoesNotFitError(
                f"--expert-slots is {slots}, and {transit} for what is on its way: "
                f"{megabytes((slots + transit) * size)}; there is room for {megabytes(room)}",
                hint="give fewer, or a larger --vram-budget",
                param="--expert-slots",
            )
        return replace(plan, experts_nbytes=(slots + transit) * size)
    # A step brings in a token's experts; with fewer slots than that nothing could be cached.
    least = moe.num_experts_per_token * layout.slab_nbytes
    return replace(plan, experts_nbytes=min(max(room, least), everything))


def _transit(placed: _Placed, layout: SlabLayout, step_tokens: int) -> int:
    """Slots beside those that are asked for: what a layer fetches lies there until the step has used it."""
    moe = placed.room.spec.moe
    assert moe is not None
    uses = min(step_tokens * moe.num_experts_per_token, moe.num_experts)
    return most_fetched(cast(Placement, placed.mode), uses * layout.num_slices)


def _record_slots(
    layout: SlabLayout, vram: VramPlan, sizes: ModelSizes, asked: int | None, chosen: Chosen
) -> None:
    slots = vram.experts_nbytes // layout.slice_nbytes
    share = vram.experts_nbytes / max(sizes.expert_nbytes, 1)
    what = (
        f"slices of {megabytes(layout.slice_nbytes)}, {min(share, 1.0):.0%} of the experts' bytes"
    )
    if asked is None:
        chosen("expert_slots", slots, f"{what}: what everything else leaves")
    else:
        chosen("expert_slots", asked, f"as configured: {what}, those for transit included")
