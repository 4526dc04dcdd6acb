"""The scheduler's own records: a sequence, and the request that its siblings share."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.core.request import GenerationRequest
from headrace.kv.prefix import CacheSpace, PrefixNode


@dataclass(eq=False)
class Group:
    """One request and its ``n`` sequences.

    cached_tokens: prompt tokens that the prefix cache held when the request was first placed.
    """

    request: GenerationRequest
    space: CacheSpace
    sequences: list[Sequence] = field(default_factory=list["Sequence"])
    placed: bool = False
    cached_tokens: int = 0

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)


@dataclass(eq=False)
class Sequence:
    """One continuation of a prompt.

    tokens: prompt and generated ids; siblings share the prompt's own until they say something, so that a
        request for many choices of a long prompt takes no memory for each while it waits
    max_tokens_total: the sequence ends when ``tokens`` is this long
    blocks: KV blocks that hold positions 0, 1, ...; the sequence has one reference to each
    nodes: the prefix nodes of its leading full blocks, ``nodes[i].block == blocks[i]``
    num_computed: positions whose keys and values are in the blocks
    """

    seq_id: int  # counts up with submission, so it is also the order of arrival
    group: Group
    index: int
    tokens: tuple[int, ...] | list[int]
    max_tokens_total: int
    blocks: list[int] = field(default_factory=list[int])
    nodes: list[PrefixNode] = field(default_factory=list[PrefixNode])
    num_computed: int = 0

    def take(self, token_id: int) -> None:
        """Append a generated token."""
        if isinstance(self.tokens, tuple):
            self.tokens = list(self.tokens)
        self.tokens.append(token_id)

    @property
    def num_remaining(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.group.num_prompt

    @property
    def cache_parent(self) -> CacheSpace | PrefixNode:
        """What the first block that is not in the prefix cache yet hangs on."""
        return self.nodes[-1] if self.nodes else self.group.space

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Every prompt row must be computed: its logits are part of the answer."""
        return (
            self.index == 0
            and self.num_generated == 0
            and self.group.request.sampling.prompt_logprobs is not None
        )
