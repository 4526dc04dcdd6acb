"""What PCIe and the CPU deliver now: the profile's rates, corrected on live steps.

Each path keeps its last few samples (bytes over seconds). Their median moves the estimate: one step
that was interrupted changes nothing, a machine that stays busy changes the split after half a window,
and a machine that is free again changes it back.

A path that the split stopped using gives no samples, so a low estimate could never be corrected. Its
estimate therefore returns towards the profile's rate while no sample comes; the split tries the path
again, and samples decide. (Promotion uses PCIe's idle time, so PCIe is rarely without samples.)

What a request to the CPU takes beside its bytes (to plan, to quantise, to wait for each other; some 10 to
20 us of 300) is estimated apart, from how the times of a step's requests depend on their sizes: taken for a
part of the rate, it would make the CPU look slow where layers miss little, and fast where they miss much.

Without a profile the first estimates are quick probes, which are taken in a hurry and alone; the first
full window of samples replaces them outright.

Pure arithmetic: no clocks here; callers pass seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from statistics import median

from headrace.core.errors import ConfigError
from headrace.experts.split import GIGA, PathRates, split_table

# Samples in the window: up to four outliers in a row pass unnoticed, five steps of a busy machine
# (some 30 to 100 ms of decoding) change the split.
WINDOW = 9
# Share of the way to the window's median that one sample moves the estimate.
GAIN = 0.25
# Samples that may be missing before the estimate starts to return, and for how many more it takes to
# come half the way back to the profile's rate. The engine takes a sample a step, so a path that the split
# has left alone is tried again after half a second to a second of decoding.
PATIENCE = 64
RETURN_HALF = 256
# Less than this share of a slice is latency, not bandwidth.
SMALLEST_SHARE = 0.5
# A new split table is worth writing to the GPU when a rate has moved by this share.
WORTH_A_TABLE = 0.03


@dataclass(frozen=True)
class Prior:
    """The rate to begin with, in GB/s. ``probed``: by a quick probe, not by a machine profile."""

    gbps: float
    probed: bool = False


class RateEstimate:
    """One path's rate. Bytes and seconds in, GB/s out."""

    def __init__(self, prior: Prior, *, latency_s: float = 0.0, least_nbytes: int = 1) -> None:
        """
        Args:
            latency_s: part of each sample's seconds that does not depend on its bytes.
            least_nbytes: smaller samples say nothing about the rate and are passed over.
        """
        if prior.gbps <= 0:
            raise ConfigError(
                f"a rate of {prior.gbps} GB/s cannot be corrected, expected more than 0"
            )
        self.prior = prior
        self.gbps = prior.gbps
        self.latency_s = latency_s
        self.least_nbytes = least_nbytes
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._home = None if prior.probed else prior.gbps
        self._missed = 0

    def observe(self, nbytes: int, seconds: float) -> None:
        """One copy or computation of ``nbytes`` took ``seconds``, its latency included."""
        busy_s = seconds - self.latency_s
        if nbytes < self.least_nbytes or busy_s <= 0:
            return
        self._missed = 0
        self._window.append(nbytes / busy_s / GIGA)
        middle = median(self._window)
        if self._home is None:
            if len(self._window) == WINDOW:
                self._home = self.gbps = middle
        elif len(self._window) > WINDOW // 2:
            self.gbps += GAIN * (middle - self.gbps)

    def rest(self) -> None:
        """A layer passed without work for this path."""
        self._missed += 1
        if self._missed <= PATIENCE:
            return
        self._window.clear()
        home = self.prior.gbps if self._home is None else self._home
        self.gbps = home + (self.gbps - home) * 0.5 ** (1 / RETURN_HALF)


# Requests of a step whose sizes vary by less (standard deviation over mean) say nothing about what does not
# depend on the size; and the line through two points is only noise.
LEAST_VARIATION = 0.1
LEAST_REQUESTS = 4
# The line of one step is off by some 30 us where requests take 300 and are disturbed by 20 or so: the median
# of many steps, followed slowly, by a few. It is a property of the machine that hardly changes.
FIXED_WINDOW = 33
FIXED_GAIN = 0.1
# Of a step's mean time of a request, what is not bytes is at most this share: more is noise, too.
MOST_FIXED = 0.5


@dataclass(frozen=True)
class RequestSums:
    """Sums over a step's requests to one path: how many, their bytes and seconds, and products of these."""

    count: int = 0
    nbytes: float = 0.0
    seconds: float = 0.0
    square_nbytes: float = 0.0
    nbytes_s: float = 0.0

    @property
    def fixed_s(self) -> float | None:
        """Seconds at no bytes of the least-squares line; None if the requests do not show it."""
        n = self.count
        if n < LEAST_REQUESTS:
            return None
        spread = n * self.square_nbytes - self.nbytes**2  # n^2 times the variance
        if spread <= (LEAST_VARIATION * self.nbytes) ** 2:
            return None
        slope = (n * self.nbytes_s - self.nbytes * self.seconds) / spread
        mean_s = self.seconds / n
        return min(max(mean_s - slope * self.nbytes / n, 0.0), MOST_FIXED * mean_s)


class FixedCost:
    """Seconds of a request that its bytes do not explain. A step's requests in, seconds out."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._window: deque[float] = deque(maxlen=FIXED_WINDOW)

    def observe(self, requests: RequestSums) -> None:
        """Take in a step; one without a line changes nothing."""
        found = requests.fixed_s
        if found is None:
            return
        self._window.append(found)
        if len(self._window) > WINDOW // 2:
            self.seconds += FIXED_GAIN * (median(self._window) - self.seconds)


@dataclass(frozen=True)
class LayerTimes:
    """What one layer (or one step, added up) did on both paths. Nothing fetched: 0 and 0.0.

    requests: those that the CPU computed, if they are known one by one.
    """

    fetched_nbytes: int = 0
    fetch_s: float = 0.0
    computed_nbytes: int = 0
    compute_s: float = 0.0
    requests: RequestSums = RequestSums()


class _Path:
    """One path's estimates: beside the other path, and alone if the two are told apart."""

    def __init__(self, together: RateEstimate | None, alone: RateEstimate | None) -> None:
        self.together = together
        self.alone = alone

    def observe(self, nbytes: int, seconds: float, *, other_busy: bool) -> None:
        """A sample corrects the estimate of its circumstances; the other estimate rests."""
        matching = self.together if other_busy or self.alone is None else self.alone
        for estimate in (self.together, self.alone):
            if estimate is None:
                continue
            if nbytes and estimate is matching:
                estimate.observe(nbytes, seconds)
            else:
                estimate.rest()


class RateTracker:
    """Both paths' estimates, and the split table that follows from them.

    Where the profile has rates alone beside the overlapped ones, a sample counts for the kind that it
    is: a path that is slow only under overlap keeps its own rate, and the split moves to one path.
    """

    def __init__(self, rates: PathRates, *, probed: bool = False) -> None:
        """
        Args:
            rates: the profile's, or quick probes' if ``probed``. A path of rate 0 stays unused.
        """
        self.base = rates
        least = int(SMALLEST_SHARE * rates.slice_nbytes)

        def estimate(gbps: float | None, latency_s: float) -> RateEstimate | None:
            if not gbps:
                return None
            return RateEstimate(Prior(gbps, probed), latency_s=latency_s, least_nbytes=least)

        fetch_s, cpu_s = rates.fetch_latency_s, rates.cpu_latency_s
        self._pcie = _Path(
            estimate(rates.pcie_gbps, fetch_s), estimate(rates.pcie_alone_gbps, fetch_s)
        )
        self._cpu = _Path(estimate(rates.cpu_gbps, cpu_s), estimate(rates.cpu_alone_gbps, cpu_s))
        self._fixed = FixedCost()
        self._tabled: PathRates | None = None

    def observe(self, times: LayerTimes) -> None:
        """Take in one layer's or step's measurements; a path without work rests."""
        fetched, computed = times.fetched_nbytes, times.computed_nbytes
        self._pcie.observe(fetched, times.fetch_s, other_busy=computed > 0)
        self._fixed.observe(times.requests)
        compute_s = times.compute_s - times.requests.count * self._fixed.seconds
        self._cpu.observe(computed, compute_s, other_busy=fetched > 0)

    @property
    def rates(self) -> PathRates:
        """The present rates."""
        pcie, cpu = self._pcie, self._cpu
        return replace(
            self.base,
            pcie_gbps=0.0 if pcie.together is None else pcie.together.gbps,
            cpu_gbps=0.0 if cpu.together is None else cpu.together.gbps,
            cpu_latency_s=self.base.cpu_latency_s + self._fixed.seconds,
            pcie_alone_gbps=None if pcie.alone is None else pcie.alone.gbps,
            cpu_alone_gbps=None if cpu.alone is None else cpu.alone.gbps,
        )

    def new_table(self, max_missing: int) -> tuple[int, ...] | None:
        """The split table if it is the first or a rate has moved since the last one, else None."""
        now, then = self.rates, self._tabled
        if then is not None and not any(
            _moved(a, b)
            for a, b in (
                (now.pcie_gbps, then.pcie_gbps),
                (now.cpu_gbps, then.cpu_gbps),
                (now.pcie_alone_gbps or 0.0, then.pcie_alone_gbps or 0.0),
                (now.cpu_alone_gbps or 0.0, then.cpu_alone_gbps or 0.0),
            )
        ):
            return None
        self._tabled = now
        return split_table(max_missing, now)


def _moved(now: float, then: float) -> bool:
    return abs(now - then) > WORTH_A_TABLE * then
