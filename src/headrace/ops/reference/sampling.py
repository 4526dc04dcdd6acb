"""The next token of each row of logits, by plain sorts: the oracle of ``sample``.

``headrace.engine.sampler`` says what is kept and how it is drawn from; here are its sums in fixed point.
A weight, exp((l - max) / temperature) in [0, 1], counts as so many whole units of 2^-44, rounded down.
Sums of integers do not depend on their order, so that any number of programs may add up any parts of
a row and draw the same token. What rounding leaves out is below V * 2^-44 of the whole: 1e-8.
"""

from __future__ import annotations

import torch

from headrace.core.errors import InternalError
from headrace.ops.records import NO_RULE

MASS_BITS = 44
_MOST_BITS = 62  # of the sum of a vocabulary


def mass_bits(vocab: int) -> int:
    """Weights are whole numbers of 2 ** -this: as fine as int64 sums of ``vocab`` of them allow."""
    return min(MASS_BITS, _MOST_BITS - (vocab - 1).bit_length())


def sample(
    logits: torch.Tensor,
    rules: torch.Tensor,
    counters: torch.Tensor,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose each row's token by its rule.

    Args:
        logits: float32 [R, V], raw.
        rules: float64 [R, 5], ``ops.records.Rule`` of each row, on the logits' device.
        counters: int32 zeros, one for each row at least, that calls running at the same time must not share.
        tokens: int64 [R] that takes the ids, too, for the next step to read.

    Returns int32 [2, R]: token ids, and the bits of the float32 that is each row's largest logit. A row
    whose largest logit is not finite, a NaN first of all, has the id of that. Rows without a rule have
    zeros.

    Raises:
        InternalError: shapes do not fit.
    """
    check(logits, rules, counters, tokens)
    largest, ids = logits.max(-1)
    ids = logits.argmax(-1)  # the first of equals, and a NaN before anything
    listed: list[list[float]] = rules.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    chosen = [
        int(best) if not rule[0] > 0.0 else _draw(row, float(top), rule, int(best))
        for row, rule, top, best in zip(logits, listed, largest, ids, strict=True)
    ]
    found = torch.tensor(chosen, dtype=torch.int32, device=logits.device)
    both = torch.stack((found, largest.contiguous().view(torch.int32)))
    picked = torch.where((rules[:, 0] < 0.0)[None], 0, both)
    if tokens is not None:
        tokens.copy_(picked[0])
    return picked


def check(
    logits: torch.Tensor,
    rules: torch.Tensor,
    counters: torch.Tensor,
    tokens: torch.Tensor | None,
) -> None:
    """Refuse what does not fit together.

    Raises:
        InternalError: says what.
    """
    rows = logits.shape[0]
    if logits.dtype != torch.float32 or logits.ndim != 2 or not logits.shape[1]:
        raise InternalError(
            f"sample: logits are {logits.dtype} {tuple(logits.shape)}, expected float32 [R, V]"
        )
    if rules.dtype != torch.float64 or tuple(rules.shape) != (rows, len(NO_RULE)):
        raise InternalError(
            f"sample: rules are {rules.dtype} {tuple(rules.shape)}, expected float64 [{rows}, 5]"
        )
    if len(counters) < rows:
        raise InternalError(f"sample: {len(counters)} counters for {rows} rows")
    if tokens is not None and (tokens.dtype != torch.int64 or tuple(tokens.shape) != (rows,)):
        raise InternalError(
            f"sample: tokens are {tokens.dtype} {tuple(tokens.shape)}, expected int64 [{rows}]"
        )


def _draw(logits: torch.Tensor, largest: float, rule: list[float], best: int) -> int:
    """The token of one row [V] by a rule with a temperature."""
    temperature, min_p, top_k, top_p, number = rule
    if largest - largest != 0.0:  # a NaN or infinite
        return best
    weights = torch.exp((logits - largest) / torch.tensor(temperature, dtype=torch.float32))
    masses = (weights.double() * 2.0 ** mass_bits(len(logits))).long()
    order = torch.sort(weights, descending=True, stable=True).indices
    order = order[: int((weights >= torch.tensor(min_p, dtype=torch.float32)).sum())]
    if top_k:
        order = order[: int(top_k)]
    sums = masses[order].cumsum(0)
    if top_p < 1.0:
        total = int(sums[-1])
        target = min(max(-int(-top_p * float(total) // 1), 1), total)
        order = order[: int(torch.searchsorted(sums, target)) + 1]
    kept = order.sort().values
    sums = masses[kept].cumsum(0)
    total = int(sums[-1])
    mark = min(int(number * float(total)), total - 1)
    return int(kept[int(torch.searchsorted(sums, mark, right=True))])
