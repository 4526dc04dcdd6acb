"""How much of a text's routing a replay needs to say something. Apart from the replay, which needs NumPy."""

from __future__ import annotations

from headrace.core.words import counted, plural

# Below it a replay is shown with a caution. A cache starts empty: with half of the experts resident, replays
# of 32 tokens of the demo mixture's ten traces were 22% slower on average than those of 384, of 16 tokens
# 43%; from 128 on it is 4%, and 8 of 10 replays lie within 21% (2026-11-30).
FEW_TOKENS = 128


def caution(recorded: int) -> str | None:
    """What to think of a replay of so many recorded tokens; None: nothing in particular."""
    if recorded >= FEW_TOKENS:
        return None
    return (
        f"{counted(recorded, 'token')} of routing {plural(recorded, 'says', 'say')} little: the cache starts "
        "empty, and one passage is not the text; "
        f"below {FEW_TOKENS} tokens a replay can come out at half of the rate"
    )
