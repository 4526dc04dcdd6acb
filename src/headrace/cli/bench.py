"""``headrace bench machine``: measure this machine once, so that the engine and plans know it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.flags import Commands, add_command
from headrace.cli.outputs import check_output, writing
from headrace.cli.progress import loading_progress
from headrace.cli.reporting import note
from headrace.core.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from headrace.machine.gpu_rates import CudaSide
    from headrace.machine.pages import HostBlock
    from headrace.machine.profile import MachineProfile

# Read by the loops: many last-level caches, of which two-socket machines have a quarter of a gigabyte.
_READ_NBYTES = 4 << 30
_READ_SHARE = 8  # at most this part of the memory that is free


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "bench",
        "measure this machine, in about a minute, and keep its profile for later runs",
        run,
    )
    parser.add_argument(
        "what",
        metavar="WHAT",
        choices=("machine",),
        help="machine: memory, CPU, GPU and their link",
    )
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the picture into a file (needs matplotlib)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the profile here instead of the cache"
    )


def run(args: argparse.Namespace) -> int:
    from headrace.cli.bench_report import draw_png, lines_of_plot, print_table
    from headrace.cli.columns import wants_color
    from headrace.explain.report_png import require_matplotlib

    # Before the minute, not after it.
    if args.png is not None:
        require_matplotlib()
        check_output(args.png, "--png", ".png")
    if args.output is not None:
        check_output(args.output, "--output")
    else:
        _check_cache()
    _note_busy()
    with loading_progress() as progress:
        profile, peaks, path = measure(args.output, progress)
    if args.png is not None:
        with writing(args.png, "--png"):
            draw_png(profile, args.png)
    if args.json:
        print(profile.to_json())
    else:
        print_table(profile, peaks)
        for line in lines_of_plot(profile, color=wants_color()):
            print(line)
    note(f"the profile is stored in {path}")
    return 0


def _note_busy() -> None:
    """Say that other programs are at work before the minute begins: it may be a bad one."""
    from headrace.machine.disturbance import DISTURBED_SHARE, Watch

    busy = Watch().look()
    if busy > DISTURBED_SHARE:
        note(
            f"other programs keep {busy:.0%} of the CPUs busy: what is measured beside them is too low"
        )


def _check_cache() -> None:
    """Refuse a cache that the profile could not be kept in.

    Raises:
        ConfigError: the folder cannot be made or written to.
    """
    from headrace.machine.profile_store import PROFILES_VARIABLE, profiles_folder

    folder = profiles_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_output(folder / "profile.json", PROFILES_VARIABLE)
    except (OSError, ConfigError):
        raise ConfigError(
            f"the profile's folder {folder} cannot be written to",
            hint=f"name another by --output FILE or the environment's {PROFILES_VARIABLE}",
            param="--output",
        ) from None


def measure(
    output: Path | None, progress: Callable[[str, float], None] | None
) -> tuple[MachineProfile, dict[str, float], Path]:
    """Measure and store: the profile, theoretical peaks by name of rate, and where it lies."""
    from headrace.experts.measure import expert_loads
    from headrace.machine.bandwidth import HostLoads, Measurement
    from headrace.machine.link import link_peak_gbps, read_link
    from headrace.machine.pages import HostBlock
    from headrace.machine.peaks import published_peaks
    from headrace.machine.probe import probe_machine
    from headrace.machine.profile_store import machine_key, profiles_folder, save_profile
    from headrace.machine.threads import choose_threads
    from headrace.ops.measure import read_load
    from headrace.ops.registry import cpu_experts

    machine = probe_machine()
    threads = choose_threads(machine.cpu).threads
    free = machine.memory.usable_available_nbytes
    block = HostBlock(max(64 << 20, min(_READ_NBYTES, free // _READ_SHARE) >> 21 << 21))
    touch(block, threads)
    link = read_link()
    peaks: dict[str, float] = {}
    try:
        with _gpu_side() as gpu:
            try:
                experts = expert_loads(cpu_experts(), threads=threads)
            except HeadraceError as error:
                note(f"CPU experts are left out: {error.message}")
                experts = {}
            loads = HostLoads(read_load(block), experts)
            profile = Measurement(machine, loads, gpu, link, progress).run()
            if gpu is not None:
                peaks = published_peaks(gpu.profile) | gpu.peaks()
                peak = link_peak_gbps(link)
                names = ("pcie_h2d", "pcie_d2h", "pcie_gather")
                peaks |= {} if peak is None else dict.fromkeys(names, peak)
    finally:
        block.release()
    if output is not None:
        with writing(output, "--output"):
            profile.save(output)
        return profile, peaks, output
    key = machine_key(machine.cpu, None if profile.gpu is None else profile.gpu.name)
    return profile, peaks, save_profile(profile, key, profiles_folder())


def touch(block: HostBlock, threads: int) -> None:
    """Make the pages of a block exist: unwritten ones would all be read from one page of zeros."""
    from headrace.machine.pages import HUGE_PAGE_NBYTES, touch_for_writing

    step = 64 * HUGE_PAGE_NBYTES
    starts = range(0, block.nbytes, step)
    with ThreadPoolExecutor(threads) as pool:
        sizes = [min(step, block.nbytes - start) for start in starts]
        list(pool.map(touch_for_writing, [block.address + start for start in starts], sizes))


@contextmanager
def _gpu_side() -> Generator[CudaSide | None, None, None]:
    from headrace.machine.gpu_rates import CudaSide
    from headrace.ops.measure import gpu_kernels

    kernels = gpu_kernels()
    if kernels is None:
        yield None
        return
    try:
        side = CudaSide(kernels)
    except HeadraceError as error:
        note(f"the GPU is left out: {error.message}")
        yield None
        return
    try:
        yield side
    finally:
        side.close()
