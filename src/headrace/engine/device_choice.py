"""Tokens chosen where the logits are: which sequences' can be, and by what rule.

A device chooses by five numbers of a row, its rule. The random one is the host's hash, so that a seeded
request draws the same numbers wherever it is chosen for (``engine.sampler``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.core.step import ScheduledChunk
from headrace.engine.sampler import FLOAT64_TEMPERATURE, SamplingState, uniform
from headrace.ops.records import GREEDY_RULE, NO_RULE, Rule
from headrace.ops.registry import OpSet, resolve


def is_chosen_on_device(state: SamplingState) -> bool:
    """Whether a device can choose the sequence's tokens: of raw logits, and nobody asks for more of them."""
    if state.changes_logits or state.params.logprobs is not None:
        return False
    return state.greedy or state.params.temperature > FLOAT64_TEMPERATURE


def rule_of(chunk: ScheduledChunk, state: SamplingState) -> Rule:
    """How a device chooses the token behind a chunk; ``NO_RULE`` where it does not."""
    if not chunk.sample or not is_chosen_on_device(state):
        return NO_RULE
    if state.greedy:
        return GREEDY_RULE
    p = state.params
    number = uniform(state.seed, state.index, chunk.start + len(chunk.token_ids))
    return p.temperature, p.min_p, float(p.top_k), p.top_p, number


class TokenChooser:
    """Chooses tokens on a device, for up to ``max_rows`` rows at once.

    Args:
        decoder: whose operations choose, so that whoever watches them sees it; toys have none.
        backends: to take the operation from otherwise.
    """

    def __init__(
        self, decoder: object, backends: Sequence[str], device: torch.device, max_rows: int
    ) -> None:
        found = getattr(decoder, "ops", None)
        self._ops = found if isinstance(found, OpSet) and found.has("sample") else resolve(backends)
        self._device = device
        self._counters = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def choose(
        self, logits: torch.Tensor, rules: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See the operation ``sample``: int32 [2, R], token ids and bits of the largest logits.

        tokens: int64 [R], takes the ids, too.
        """
        return self._ops.sample(logits, rules, self._counters, tokens)

    def choose_by(self, logits: torch.Tensor, rules: Sequence[Rule]) -> torch.Tensor:
        """``choose`` by rules that are on the host."""
        return self.choose(logits, torch.tensor(rules, dtype=torch.float64).to(self._device))
