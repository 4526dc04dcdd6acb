"""docs/reference/formats.md from the format table and files; ``--check`` fails if it is stale."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from headrace.core.numeric import FORMATS  # noqa: E402
from headrace.formats.base import load_formats  # noqa: E402

FENCE = "```"
PAGE = Path("docs/reference/formats.md")

# Where a format is met: what writes it, or a model that many have on disk.
WHERE = {
    "f32": "norms, biases, routers of any checkpoint",
    "f16": "older checkpoints, GGUF embeddings",
    "bf16": "most published checkpoints",
    "fp8_e4m3": "DeepSeek, Qwen `-FP8` (128 x 128); vLLM-style FP8 (one scale)",
    "mxfp4": "gpt-oss on Hugging Face (`_blocks`, `_scales`)",
    "mxfp4_gguf": "gpt-oss as GGUF",
    "nvfp4": "NVIDIA ModelOpt; compressed-tensors `nvfp4-pack-quantized`",
    "q4_0": "GGUF `Q4_0`, QAT releases",
    "q4_1": "GGUF `Q4_1`, parts of low-bit mixes",
    "q5_0": "GGUF `Q5_0`, rows that are no multiple of 256",
    "q5_1": "GGUF `Q5_1`, rows that are no multiple of 256",
    "q8_0": "GGUF `Q8_0`",
    "q2_k": "GGUF `Q2_K`",
    "q3_k": "GGUF `Q3_K_S`, `_M`, `_L`",
    "q4_k": "GGUF `Q4_K_S`, `Q4_K_M`: the most common",
    "q5_k": "GGUF `Q5_K_S`, `Q5_K_M`",
    "q6_k": "GGUF `Q6_K`, the larger tensors of `Q4_K_M`",
    "iq4_nl": "GGUF `IQ4_NL`, rows that are no multiple of 256",
    "iq4_xs": "GGUF `IQ4_XS`",
}

HEAD = """\
# Numeric formats

<!-- Written by scripts/docs_formats.py from core/numeric.py and formats/: run `make docs`. -->

What Headrace reads. Weights stay in these formats in memory; nothing is converted but where a note
says so. Each file of `src/headrace/formats/` has the exact values as plain PyTorch, tested bit for
bit against the `gguf` package (GGUF types) or the specification's formulas (the others). Anything
not in this table is refused with the tensor's name and this list.

| format | bits per weight | block | GGUF type | where it is met | notes |
| --- | --- | --- | --- | --- | --- |
"""

RULES = """
## Rules that hold for all of them

- **Values.** Products and sums are rounded to float32 one at a time, in the order written in each
  layout; no fused multiply-add. Infinities and NaNs propagate as IEEE 754 has it. Subnormal scales
  are kept.
- **Scale bytes.** E8M0: byte 0 is 2^-127 (a float32 subnormal), 254 is 2^127, 255 is NaN; there is
  no zero. E4M3: 0x7F and 0xFF are NaN, there is no infinity, the largest value is 448, subnormals
  are multiples of 2^-9. The `gguf` package decodes E8M0's byte 255 as 2^128 and E2M1's code 8 as
  +0; the OCP specifications (NaN, -0) win here.
- **NaN scales.** One damaged scale would make every batch NaN, so a checkpoint is scanned on load
  and refused with tensor and block. The opt-in repair sets the scales of such blocks to zero (for
  MXFP4, whose scales have no zero, the codes too), so that they stand for zeros. Infinite scales
  are not touched.
- **Rows.** A row is a whole number of blocks. Rows may be strided: the gate and the up rows of an
  interleaved tensor are two views of the same bytes. A leading dimension counts experts, and scales
  of a whole matrix are one per expert.

## Layouts
"""


def size(nbytes: int, weights: int) -> str:
    return "one weight" if weights == 1 else f"{weights} weights, {nbytes} bytes"


def table() -> str:
    rows: list[str] = []
    for name, fmt in FORMATS.items():
        note = fmt.note or "-"
        gguf = "-" if fmt.gguf_type is None else str(fmt.gguf_type)
        bits = f"{fmt.bits_per_weight:.4g}"
        block = size(fmt.block_nbytes, fmt.block_weights)
        rows.append(f"| `{name}` | {bits} | {block} | {gguf} | {WHERE[name]} | {note} |")
    return "\n".join(rows) + "\n"


def fenced(docstring: str) -> str:
    """Turn reStructuredText's literal blocks and literals into Markdown's."""
    lines: list[str] = []
    inside = False
    for line in docstring.splitlines():
        if line.strip() == "::":
            inside = True
            lines.append(FENCE)
        elif inside and line and not line.startswith(" "):
            inside = False
            lines[-1:] = [FENCE, "", line.replace("``", "`")]
        elif inside:
            if line or lines[-1] != FENCE:
                lines.append(line.removeprefix("    "))
        else:
            lines.append(line.replace("``", "`"))
    return "\n".join(lines)


def layout(name: str) -> str:
    """The section of one format: its parts for an example matrix and its file's docstring."""
    record = load_formats()[name]
    module = importlib.import_module(f"headrace.formats.{name}")
    text = fenced(inspect.getdoc(module) or "")
    parts = ", ".join(
        f"`{part}` {str(want.dtype).removeprefix('torch.')} "
        + " or ".join(str(list(shape)) for shape in want.shapes)
        for part, want in record.layout((256, 512)).items()
    )
    encoder = "yes" if record.quantize else "no"
    return f"\n### {name}\n\n{text}\n\nParts of a 256 x 512 matrix: {parts}. Encoder: {encoder}.\n"


def pages() -> dict[Path, str]:
    missing = set(FORMATS) ^ set(WHERE) | set(FORMATS) ^ set(load_formats())
    assert not missing, f"formats without a row, a file or a place: {sorted(missing)}"
    return {PAGE: HEAD + table() + RULES + "".join(layout(name) for name in FORMATS)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check: bool = parser.parse_args().check
    (page, text), *_ = pages().items()
    path = ROOT / page
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return 0
    print(f"{'stale' if check else 'written'}: {page}", file=sys.stderr)
    if check:
        return 1
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
