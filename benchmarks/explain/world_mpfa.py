"""Figures of MpFA: SGLang with three attention back-ends on one B200."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.explain import world_conditions as c
from benchmarks.explain.world_rows import Row, ranged

NAMES = {c.LLAMA: "Llama 3.1 8B", c.QWEN: "Qwen3 14B"}
BACKENDS = {
    "fa4": "SGLang, BF16 FlashAttention-4",
    "mpfa": "SGLang, MpFA",
    "flashinfer": "SGLang, FlashInfer with an FP8 cache",
}


def mpfa_times() -> list[Row]:
    found: list[Row] = []
    times = {
        (c.LLAMA, "fa4"): 42.4,
        (c.LLAMA, "mpfa"): 6.5,
        (c.LLAMA, "flashinfer"): 42.4 / 6.38,
        (c.QWEN, "fa4"): 53.8,
        (c.QWEN, "mpfa"): 9.5,
        (c.QWEN, "flashinfer"): 53.8 / 5.59,
    }
    for (name, backend), value in times.items():
        found.append(
            Row(
                "mpfa",
                "speed",
                f"{NAMES[name]}, TPOT at 128K",
                "one B200",
                BACKENDS[backend],
                "ms",
                value,
                lambda n=name, b=backend: c.tpot_ms(n, b, 131072),
            )
        )
    rates = {
        (c.LLAMA, "fa4"): 21.2,
        (c.LLAMA, "mpfa"): 94.8,
        (c.QWEN, "fa4"): 16.2,
        (c.QWEN, "mpfa"): 61.0,
    }
    for (name, backend), value in rates.items():
        found.append(
            Row(
                "mpfa",
                "speed",
                f"{NAMES[name]}, output at 128K, TTFT included",
                "one B200",
                f"{BACKENDS[backend]}, 1,024 tokens",
                "tok/s",
                value,
                lambda n=name, b=backend: c.otps(n, b, 131072),
            )
        )
    return found


def _over(
    quantity: Callable[[str, str, int], float],
    slower: str,
    faster: str,
    names: tuple[str, ...],
    lengths: tuple[int, ...],
) -> float:
    """How many times less one back-end takes than another, geometric mean over models and lengths."""
    return c.geometric_mean(
        [quantity(n, slower, x) / quantity(n, faster, x) for n in names for x in lengths]
    )


def _gain(
    faster: str, slower: str, names: tuple[str, ...], lengths: tuple[int, ...], users: int
) -> float:
    return c.geometric_mean(
        [c.otps(n, faster, x, users) / c.otps(n, slower, x, users) for n in names for x in lengths]
    )


def mpfa_ratios() -> list[Row]:
    both, long = (c.LLAMA, c.QWEN), c.LENGTHS
    far = (131072,)

    def row(what: str, setting: str, value: float, predict: Callable[[], float]) -> Row:
        return Row("mpfa", "ratio", what, "one B200", setting, "x", value, predict)

    def between(
        what: str, setting: str, low: float, high: float, predict: Callable[[], float]
    ) -> Row:
        return ranged(low, high, row(what, setting, 0.0, predict))

    mpfa, fi = "MpFA against BF16 FlashAttention-4", "MpFA against FlashInfer FP8"
    return [
        row(
            "TTFT, mean of both models, 16K to 128K",
            mpfa,
            1.11,
            lambda: _over(c.ttft_s, "fa4", "mpfa", both, long),
        ),
        row(
            "TPOT, mean of both models, 16K to 128K",
            mpfa,
            3.30,
            lambda: _over(c.tpot_ms, "fa4", "mpfa", both, long),
        ),
        row(
            "output, mean of both models, 16K to 128K",
            mpfa,
            2.81,
            lambda: _gain("mpfa", "fa4", both, long, 1),
        ),
        row(
            "Llama 3.1 8B, TTFT at 128K",
            mpfa,
            1.16,
            lambda: _over(c.ttft_s, "fa4", "mpfa", (c.LLAMA,), far),
        ),
        row(
            "Qwen3 14B, TTFT at 128K",
            mpfa,
            1.14,
            lambda: _over(c.ttft_s, "fa4", "mpfa", (c.QWEN,), far),
        ),
        between(
            "TTFT at 32K to 128K",
            fi,
            1.16,
            1.27,
            lambda: _over(c.ttft_s, "flashinfer", "mpfa", both, long[1:]),
        ),
        between(
            "TTFT",
            "FlashInfer FP8 against BF16 FlashAttention-4",
            0.91,
            0.96,
            lambda: _over(c.ttft_s, "fa4", "flashinfer", both, long),
        ),
        row(
            "output, mean of both models, 32K to 128K",
            fi,
            1.06,
            lambda: _gain("mpfa", "flashinfer", both, long[1:], 1),
        ),
        between(
            "output at 128K", fi, 1.11, 1.12, lambda: _gain("mpfa", "flashinfer", both, far, 1)
        ),
        row(
            "output, 8 at a time, mean, 8K to 128K",
            mpfa,
            1.33,
            lambda: _gain("mpfa", "fa4", both, (8192, *long), 8),
        ),
        row(
            "Llama 3.1 8B, output at 128K, 8 at a time",
            mpfa,
            1.70,
            lambda: _gain("mpfa", "fa4", (c.LLAMA,), far, 8),
        ),
        row(
            "Qwen3 14B, output at 128K, 8 at a time",
            mpfa,
            1.89,
            lambda: _gain("mpfa", "fa4", (c.QWEN,), far, 8),
        ),
        row(
            "Qwen3 14B, output at 16K, 16 at a time",
            mpfa,
            1.04,
            lambda: _gain("mpfa", "fa4", (c.QWEN,), long[:1], 16),
        ),
        row(
            "Qwen3 14B, output at 32K, 16 at a time",
            mpfa,
            1.13,
            lambda: _gain("mpfa", "fa4", (c.QWEN,), long[1:2], 16),
        ),
        row(
            "output, 8 at a time, mean, 8K to 128K",
            fi,
            1.12,
            lambda: _gain("mpfa", "flashinfer", both, (8192, *long), 8),
        ),
        between(
            "output at 128K, 8 at a time",
            fi,
            1.18,
            1.31,
            lambda: _gain("mpfa", "flashinfer", both, far, 8),
        ),
        row(
            "Qwen3 14B, output at 16K, 16 at a time",
            fi,
            1.09,
            lambda: _gain("mpfa", "flashinfer", (c.QWEN,), long[:1], 16),
        ),
        row(
            "Qwen3 14B, output at 32K, 16 at a time",
            fi,
            1.17,
            lambda: _gain("mpfa", "flashinfer", (c.QWEN,), long[1:2], 16),
        ),
    ]


def mpfa_shares() -> list[Row]:
    decode = {1024: 15, 4096: 34, 16384: 62, 32768: 75, 65536: 85, 131072: 91.4}
    prefill = {16384: 26, 32768: 40, 65536: 57, 131072: 72.5}
    fixed = "short caches: attention's fixed cost (launch, tail) is not in the model"
    return [
        Row(
            "mpfa",
            "share",
            f"Llama 3.1 8B, {phase}, attention's part at {length // 1024}K",
            "one B200",
            BACKENDS["fa4"],
            "%",
            value,
            lambda p=phase, x=length: c.attention_share(p, x),
            why=fixed if phase == "decode" and length < 16384 else "",
        )
        for phase, points in (("prefill", prefill), ("decode", decode))
        for length, value in points.items()
    ]
