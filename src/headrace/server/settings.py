"""How the HTTP front end behaves; frozen, given once to ``create_app``."""

from __future__ import annotations

from dataclasses import dataclass

# Node's fetch gives up after 300 s without a byte, some proxies after 30 s or 60 s; 5 s is well
# under all of them and one 14-byte comment per 5 s costs nothing.
DEFAULT_KEEPALIVE_S = 5.0

# Longer than any step that somebody would wait for: 512 tokens of a prompt through a dense 70B model on a
# CPU of 120 GFLOP/s take 600 s. Who is watched by a supervisor that restarts sets less on a GPU.
DEFAULT_STUCK_S = 600.0

# A 1M-token prompt of text is about 4 MiB; as a JSON array of token ids about 7 MiB.
DEFAULT_MAX_BODY_NBYTES = 32 * 2**20


@dataclass(frozen=True)
class ServerSettings:
    """What the operator of a server may choose.

    Args:
        model_ids: the names that requests may use as ``model``; the first is the one reported back.
            Empty: the engine's own name for the model.
        api_key: when set, every route but ``/health`` needs it (Bearer or ``x-api-key``).
        cors_origins: browser origins that may call the server; ``("*",)`` allows all.
        keepalive_s: seconds of silence in a stream after which a comment line is sent.
        stuck_s: an engine that says nothing for so many seconds, though it owes an answer, counts as stuck:
            no more requests are accepted until it goes on; 0 to wait for ever.
        max_body_nbytes: larger request bodies get 413.
    """

    model_ids: tuple[str, ...] = ()
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    keepalive_s: float = DEFAULT_KEEPALIVE_S
    stuck_s: float = DEFAULT_STUCK_S
    max_body_nbytes: int = DEFAULT_MAX_BODY_NBYTES
