"""What a caller asks for and what comes back: the records between the server and the engine.

They are plain and immutable, so that they can cross a process boundary and be stored in tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended. ``STOP``: an end token, stop string or stop id. ``LENGTH``: a limit."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when generation ends.

    Penalties follow the usual definitions: presence and frequency count generated tokens only,
    repetition counts the prompt too. ``temperature == 0`` is greedy, exactly like ``top_k == 1``;
    among equal logits the smallest token id wins.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the stop string or stop token's text in the output
    ignore_eos: bool = False
    max_tokens: int | None = None  # None: to the end of the context
    n: int = 1
    logprobs: int | None = None  # None: off; k: the chosen token and the k best alternatives
    prompt_logprobs: int | None = None  # the same for prompt tokens (``echo`` of /v1/completions)


@dataclass(frozen=True)
class GenerationRequest:
    """One request: a prompt in token ids and how to continue it, ``sampling.n`` times."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""  # prompts with different salts never share cached blocks


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of one token, and its best alternatives, most likely first.

    Values are finite: minus infinity is reported as -9999.0 so that JSON can carry it.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts of one request; ``cached_tokens`` is the part of the prompt found in the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class OutputDelta:
    """What one sequence of a request gained in a step.

    ``text`` holds whole characters only, with stop strings already removed; it can be empty while
    ``token_ids`` is not. ``finish_reason`` is set on a sequence's last delta, ``usage`` on the last
    delta of the whole request. ``prompt_logprobs`` comes once, with the first delta of sequence 0
    (its first entry is None: the first token has no prediction).
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    usage: Usage | None = None


@dataclass(frozen=True)
class RequestFailed:
    """The request ended by an error; every accepted request ends in a finish reason or in this."""

    request_id: str
    message: str
    hint: str | None = None
    param: str | None = None
    code: str | None = None
    error_class: str = "InternalError"  # a class name of core.errors
