"""Tables and the plot of the KV formats' accuracy, out of benchmarks/results/attention/accuracy.json.

python -m benchmarks.attention.report            writes accuracy.md beside it and prints bars 03.5, 03.6
python -m benchmarks.attention.report --plot     draws docs/images/kv-accuracy.png too (matplotlib)
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.attention.accuracy import BINS, OUT
from benchmarks.attention.fake import VARIANTS

IMAGE = OUT.parents[3] / "docs" / "images" / "kv-accuracy.png"
PRODUCT, FP8, DIRECT, PAPER = "nvfp4k-fp8v, R = 4", "fp8", "direct", "paper"
# Bars 03.5 and 03.6.
RECOVERED, TIMES_FP8, PERPLEXITY_WITHIN = 0.85, 1.5, 0.01
_COLOURS = ("tab:grey", "tab:cyan", "tab:blue", "tab:red", "tab:green", "tab:olive", "tab:purple")

Entries = dict[str, dict[str, Any]]


def grouped() -> dict[tuple[str, int], Entries]:
    """Entries by variant, for each model and length."""
    found: dict[tuple[str, int], Entries] = {}
    for entry in json.loads(OUT.read_text())["entries"]:
        found.setdefault((entry["model"], entry["tokens"]), {})[entry["variant"]] = entry
    return found


def recovered(entries: Entries, name: str) -> float | None:
    """The share of the KL of ``direct`` that a variant does not have."""
    if DIRECT not in entries:
        return None
    return 1 - entries[name]["kl"] / entries[DIRECT]["kl"]


def table(entries: Entries) -> list[str]:
    lines = [
        "| format | KL (nats) | of direct recovered | perplexity | to bf16 | numbers found | their NLL |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    bf16 = entries.get("bf16", entries["float32"])["perplexity"]
    for variant in VARIANTS:
        if variant.name not in entries:
            continue
        e, share = entries[variant.name], recovered(entries, variant.name)
        kept = "" if share is None or variant.name == "float32" else f"{share:.1%}"
        lines.append(
            f"| {e['variant']} | {e['kl']:.5f} | {kept} | {e['perplexity']:.3f} | "
            f"{e['perplexity'] / bf16 - 1:+.2%} | {e['retrieved']:.0%} | {e['answer_nll']:.2f} |"
        )
    return lines


def bars(entries: Entries) -> list[str]:
    """The bars' numbers, where the variants are there that they need."""
    if any(name not in entries for name in (PRODUCT, FP8, DIRECT, "bf16")):
        return []
    share, times = recovered(entries, PRODUCT), entries[PRODUCT]["kl"] / entries[FP8]["kl"]
    change = entries[PRODUCT]["perplexity"] / entries["bf16"]["perplexity"] - 1
    noise = entries[PRODUCT].get("nll_change_se", (2 * entries[PRODUCT]["kl"] / 512) ** 0.5)
    assert share is not None
    said = [
        f"recovered {share:.1%} (bar {RECOVERED:.0%})",
        f"KL {times:.2f} x fp8 (bar {TIMES_FP8})",
        f"perplexity {change:+.2%} of bf16, standard error {noise:.2%} (bar {PERPLEXITY_WITHIN:+.0%})",
    ]
    if PAPER in entries:
        said.insert(1, f"paper recovers {recovered(entries, PAPER):.1%}")
    return said


def markdown() -> str:
    lines = ["# Accuracy of KV formats", "", "Written by `python -m benchmarks.attention.report`."]
    for (model, tokens), entries in sorted(grouped().items()):
        windows = next(iter(entries.values()))["windows"]
        lines += ["", f"## {model}, {windows} x {tokens} tokens", "", *table(entries)]
        found = bars(entries)
        if found:
            lines += ["", "; ".join(found) + "."]
    return "\n".join(lines) + "\n"


def plot() -> None:
    """KL by position, one panel for each model at the longest length measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    longest: dict[str, int] = {}
    for model, tokens in grouped():
        longest[model] = max(tokens, longest.get(model, 0))
    figure, panels = plt.subplots(1, len(longest), figsize=(5.5 * len(longest), 4), squeeze=False)
    for panel, (model, tokens) in zip(panels[0], sorted(longest.items()), strict=True):
        entries = grouped()[model, tokens]
        shown = [v.name for v in VARIANTS if v.name in entries and v.name != "float32"]
        for name, colour in zip(shown, _COLOURS * 2):
            x = [(i + 0.5) * tokens / BINS for i in range(BINS)]
            panel.plot(x, entries[name]["kl_by_position"], "o-", ms=3, label=name, color=colour)
        panel.set(title=f"{model}, {tokens} tokens", xlabel="position", yscale="log")
        panel.set_ylabel("KL to float32 (nats)")
        panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(IMAGE, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plot", action="store_true")
    args = parser.parse_args()
    (OUT.parent / "accuracy.md").write_text(markdown(), encoding="utf-8")
    for (model, tokens), entries in sorted(grouped().items()):
        print(model, tokens, *bars(entries), sep="; ")
    if args.plot:
        plot()


if __name__ == "__main__":
    main()
