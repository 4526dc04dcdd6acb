"""Chooses the next token from logits. Host code on NumPy views; one row is one sequence.

The order, for one row of raw logits l:

    1. repetition penalty r over prompt and generated tokens: l / r where l > 0, else l * r
       (Keskar et al. 2019); frequency and presence penalties over generated tokens only:
       l - frequency * count - presence * [count > 0] (OpenAI's API reference); logit_bias is added
    2. temperature 0 or top_k 1: the largest logit, the smallest id among equals. Otherwise
       l / temperature
    3. min_p: keep p >= min_p * max p (Nguyen et al. 2024)
    4. top_k: keep the k largest, the smallest ids among equals at the border
    5. top_p: of what is left, keep the smallest set of largest probabilities that reaches top_p
       (Holtzman et al. 2020), the smallest ids among equals at the border
    6. one uniform number picks from what is left, in order of token id

The uniform number is a hash of (seed, index of the sequence in its request, position of the token),
so it depends on nothing that happens around the sequence.

Log-probabilities describe the model: log-softmax of the raw logits, before any of the above.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.core.errors import InternalError
from headrace.core.request import SamplingParams, TokenLogprob

Weights = npt.NDArray[np.float32]

# JSON has no minus infinity; OpenAI's API uses this value for "very unlikely" (API reference).
LOGPROB_FLOOR = -9999.0

# Up to here a difference of float32 logits divided by the temperature may overflow float32.
FLOAT64_TEMPERATURE = 1e-3

_RUN = 1024  # weights per run in the two-level draw: about the square root of a large vocabulary


@dataclass(eq=False)
class SamplingState:
    """What the sampler knows about one sequence.

    generated: how often each token was generated.
    """

    params: SamplingParams
    seed: int
    index: int
    prompt: tuple[int, ...]
    generated: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0.0 or self.params.top_k == 1

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's own log-probabilities are wanted; one sequence computes them."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def changes_logits(self) -> bool:
        p = self.params
        return bool(
            p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1 or p.logit_bias
        )

    def record(self, token_id: int) -> None:
        """Count a generated token."""
        self.generated[token_id] = self.generated.get(token_id, 0) + 1


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on the three arguments only."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, index, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def choose(logits: npt.NDArray[np.float32], state: SamplingState, position: int) -> int:
    """Return the next token of one sequence.

    Args:
        logits: float32 [vocab], raw; not changed.
        state: the sequence's parameters and history.
        position: the position that the token will have.

    Raises:
        InternalError: the logits hold a NaN or have no finite maximum.
    """
    if state.changes_logits:
        logits = penalized(logits, state)
    best = int(logits.argmax())  # the first of equals, and the first NaN if there is one
    checked_best(float(logits[best]), best, position)
    if state.greedy:
        return best
    weights = kept_weights(logits, float(logits[best]), state.params)
    return _draw(weights, uniform(state.seed, state.index, position))


def checked_best(value: float, token_id: int, position: int) -> int:
    """``token_id``, whose logit is the largest.

    Raises:
        InternalError: ``value`` is not finite.
    """
    if not math.isfinite(value):
        raise InternalError(
            f"the logits for position {position} are not finite: {value} at token {token_id}",
            hint="the checkpoint may hold NaN or infinite weights",
        )
    return token_id


def penalized(logits: npt.NDArray[np.float32], state: SamplingState) -> npt.NDArray[np.float32]:
    """Return a copy of ``logits`` [vocab] with penalties and bias applied."""
    p = state.params
    logits = logits.copy()
    generated = np.fromiter(state.generated.keys(), np.int64, len(state.generated))
    if p.repetition_penalty != 1.0:
        seen = np.union1d(generated, np.asarray(state.prompt, np.int64))
        values = logits[seen]
        r = np.float32(p.repetition_penalty)
        logits[seen] = np.where(values > 0, values / r, values * r)
    if len(generated) and (p.presence_penalty or p.frequency_penalty):
        counts = np.fromiter(state.generated.values(), np.float32, len(state.generated))
        logits[generated] -= p.frequency_penalty * counts + np.float32(p.presence_penalty)
    for token_id, bias in p.logit_bias:
        logits[token_id] += np.float32(bias)
    return logits


def kept_weights(
    logits: npt.NDArray[np.float32], maximum: float, params: SamplingParams
) -> tuple[npt.NDArray[np.int64] | None, Weights]:
    """Apply temperature, min_p, top_k and top_p.

    Returns the kept token ids in increasing order (None: all of them) and their weights,
    exp((l - max) / temperature), which are proportional to the probabilities.
    """
    kind = np.float32 if params.temperature > FLOAT64_TEMPERATURE else np.float64
    with np.errstate(over="ignore", under="ignore"):
        scaled = np.subtract(logits, maximum, dtype=kind)
        scaled /= kind(params.temperature)
        weights: Weights = np.exp(scaled, out=scaled).astype(np.float32, copy=False)
    ids: npt.NDArray[np.int64] | None = None
    if params.min_p > 0.0:
        ids, weights = _keep(ids, weights, weights >= params.min_p)
    if 0 < params.top_k < len(weights):
        ids, weights = _keep(ids, weights, _largest(weights, params.top_k))
    if params.top_p < 1.0:
        # Weights below this cannot be in the set: all of them together weigh less than what top_p
        # leaves out. It thins a peaked distribution to a few candidates in one pass.
        total = float(weights.sum(dtype=np.float64))
        floor = (1.0 - params.top_p) * total / len(weights)
        ids, weights = _keep(ids, weights, weights >= floor)
        ids, weights = _keep(ids, weights, _nucleus(weights, params.top_p * total))
    return ids, weights


def _keep(
    ids: npt.NDArray[np.int64] | None, weights: Weights, mask: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], Weights]:
    return (np.flatnonzero(mask) if ids is None else ids[mask]), weights[mask]


def _largest(values: Weights, count: int) -> npt.NDArray[np.bool_]:
    """Mark the ``count`` largest, 0 < count <= len; the first ones among equals at the border."""
    border = np.partition(values, len(values) - count)[len(values) - count]
    return _above_border(values, border, count - int(np.count_nonzero(values > border)))


def _nucleus(weights: Weights, target: float) -> npt.NDArray[np.bool_]:
    """Mark the smallest set of largest weights whose sum reaches ``target``; at least one."""
    border, above = _mass_border(weights, target)
    missing = (target - above) / float(border) if border > 0 else 1.0
    return _above_border(weights, border, max(1, int(np.ceil(missing))))


def _above_border(values: Weights, border: np.float32, num_ties: int) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = values > border
    mask[np.flatnonzero(values == border)[:num_ties]] = True
    return mask


def _mass_border(weights: Weights, target: float) -> tuple[np.float32, float]:
    """Return the largest weight that, with all larger weights, sums up to ``target``.

    A selection by radix instead of a sort: floats that are not negative are ordered like their
    bits. The mass above each pattern of the upper 16 bits gives the border's upper half, and the
    same among the weights that have it gives the lower half.

    Args:
        weights: float32 [n], not negative.
        target: where rounding leaves the total just short of it, the smallest weight is the border.

    Returns:
        the border, and the mass of all larger weights.
    """
    bits = weights.view(np.uint32)
    upper = (bits >> np.uint32(16)).astype(np.int64)
    high, above = _border_key(upper, weights, target, 0.0)
    inside = upper == high
    lower = (bits[inside] & np.uint32(0xFFFF)).astype(np.int64)
    low, above = _border_key(lower, weights[inside], target, above)
    return np.uint32((high << 16) | low).view(np.float32), above


def _border_key(
    keys: npt.NDArray[np.int64], weights: Weights, target: float, above: float
) -> tuple[int, float]:
    """The border among integer keys; ``above`` is mass that counts before any of them."""
    base = int(keys.min())
    keys = keys - base
    # bincount converts float32 itself, but three times slower
    mass = np.bincount(keys, weights=weights.astype(np.float64))[::-1]
    sums = above + np.cumsum(mass)
    at = int(np.searchsorted(sums, target))
    if at == len(sums):
        at = int(np.flatnonzero(mass)[-1]) if mass.any() else at - 1
    return base + len(mass) - 1 - at, float(sums[at] - mass[at])


def _draw(kept: tuple[npt.NDArray[np.int64] | None, Weights], number: float) -> int:
    """Pick by inverse distribution function, in two levels: a run of weights, then one of them."""
    ids, weights = kept
    starts = np.arange(0, len(weights), _RUN)
    runs = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    mark = number * float(runs[-1])
    # side="right" never picks a weight of zero, unless rounding puts the mark on the very end
    run = min(int(np.searchsorted(runs, mark, side="right")), len(runs) - 1)
    inside = weights[run * _RUN : (run + 1) * _RUN]
    sums = np.cumsum(inside, dtype=np.float64)
    mark -= float(runs[run - 1]) if run else 0.0
    where = int(np.searchsorted(sums, mark, side="right"))
    if where == len(sums):
        where = int(np.flatnonzero(inside)[-1])
    where += run * _RUN
    return where if ids is None else int(ids[where])


def logprob_of(logits: npt.NDArray[np.float32], token_id: int, top: int) -> TokenLogprob:
    """Log-probability of ``token_id`` and of the ``top`` most likely tokens (natural logarithm).

    Args:
        logits: float32 [vocab], raw.
        top: alternatives wanted, 0 for none.
    """
    maximum = float(logits.max())
    shifted = np.exp(logits - np.float32(maximum))
    log_sum = maximum + float(np.log(shifted.sum(dtype=np.float64)))

    def logprob(token: int) -> float:
        value = float(logits[token]) - log_sum
        return value if value > LOGPROB_FLOOR else LOGPROB_FLOOR

    best: tuple[tuple[int, float], ...] = ()
    if top:
        ids = np.flatnonzero(_largest(logits, min(top, len(logits))))
        order = np.lexsort((ids, -logits[ids]))
        best = tuple((int(t), logprob(int(t))) for t in ids[order])
    return TokenLogprob(token_id, logprob(token_id), best)
