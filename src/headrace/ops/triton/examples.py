"""Each attention kernel with operands of a typical call, so that it compiles for a GPU that is not here."""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.core.kv_formats import FIRST_TOKENS, RESIDUAL_UNIT
from headrace.ops.triton import (
    attention_decode,
    attention_prefill,
    prefill_layout,
    prefill_tma,
    rows,
    sealed_append,
    sealed_decode,
    sealed_prefill,
)
from headrace.ops.triton.control import unpack_instructions
from headrace.ops.triton.softmax import LOG2_E

# Types by argument name; what is not named is a float32 tensor.
_BF16 = ("keys", "values", "key_refs", "first_keys", "open_keys", "open_values")
_CODES = ("key_codes", "key_scales", "key_residuals", "value_codes")
_LISTS = ("tables", "open_pages", "context_lens", "query_start")
# Integers that a launch finds to be multiples of 16, and others.
_MULTIPLES = ("dim", "block_tokens", "stride_block", "stride_head", "stride_table")
_COUNTS = (
    *("window", "heads", "group", "width", "stride_pages", "num_shared", "open_offset", "half"),
    *("num_sequences", "num_tiles", "max_pages"),
    *("room", "own_room", "first_head", "all_heads"),
)
TYPES = {
    **dict.fromkeys(_BF16, "*bf16"),
    **dict.fromkeys(_CODES, "*u8"),
    **dict.fromkeys(_LISTS, "*i32"),
    **dict.fromkeys((*_MULTIPLES, *_COUNTS), "i32"),
    **dict.fromkeys(("positions", "slots"), "*i64"),
    "scale": "fp32",
}


@dataclass(frozen=True)
class Example:
    """``kernel`` with compile-time ``constants``, to which the architecture's ``UNPACK`` is added.

    changes: other types than ``TYPES`` has
    only: the one architecture that it is written for, if so
    """

    kernel: Any
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    changes: dict[str, str] = field(default_factory=dict)
    only: str | None = None

    def source(self, capability: int) -> Any:
        """What ``triton.compile`` takes, for a compute capability (90 for 9.0)."""
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        constants = dict(self.constants)
        if "UNPACK" in names:
            constants.setdefault("UNPACK", unpack_instructions(divmod(capability, 10)))
        types = {
            name: "constexpr" if name in constants else {**TYPES, **self.changes}.get(name, "*fp32")
            for name in names
        }
        # What a launch would find out: torch allocates at multiples of 16 bytes.
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if types[name].startswith("*") or name in _MULTIPLES
        }
        return ASTSource(
            self.kernel, types, {(names.index(k),): v for k, v in constants.items()}, aligned
        )


@dataclass(frozen=True)
class TileExample(Example):
    """A kernel in Gluon over tiles that bulk copies bring; ``types``: of the numbers in each."""

    types: dict[str, str] = field(default_factory=dict)

    def source(self, capability: int) -> Any:
        from triton.experimental.gluon._runtime import GluonASTSource
        from triton.experimental.gluon.language import NVMMASharedLayout

        plain = super().source(capability)
        layout = NVMMASharedLayout(128, 16, 2)
        tile = f"[{prefill_layout.TILE},{prefill_layout.DIM}]"
        tiles = {name: f"tensordesc<{t}{tile},{layout!r}>" for name, t in self.types.items()}
        return GluonASTSource(
            self.kernel, {**plain.signature, **tiles}, plain.constants, plain.attrs
        )


_SEALED = {"PAGE": 64, "HALF": 64, "FIRST": FIRST_TOKENS}
_NVFP4 = {**_SEALED, "NVFP4": True, "RANK": 4}
_FP8 = {**_SEALED, "NVFP4": False, "RANK": 0, "FIRST": 0}
_PARTS = {"DIM": 128, "GROUP": 8, "MIN_PART": 4, "PARTS": 64, "OVERLAPS": False}
_ROWS = {
    **{"DIM": 128, "ROWS": 128, "HAS_SINKS": True, "HAS_WINDOW": False, "LOG2": LOG2_E},
    **{"TAU": 0, "POLYNOMIAL": 0},
}
_PLAIN = {"DIM": 128, "TILE": 64, "PRECISION": "tf32"}
_TILES = {
    **{
        "PAGE": 64,
        "DIM": prefill_layout.DIM,
        "ROWS": prefill_tma.ROWS,
        "TILE": prefill_layout.TILE,
    },
    **{"HAS_SINKS": True, "HAS_WINDOW": False, "LOG2": LOG2_E, "STAGES": prefill_tma.STAGES},
    **{"REGISTERS": prefill_tma.REGISTERS},
}
_LAID = ("keys", "values", "own_keys", "own_values")

EXAMPLES: dict[str, Example] = {
    "kv_append": Example(rows.kv_append_kernel, {"DIM": 128}, 1, changes={"k": "*fp32"}),
    "seal_nvfp4k_fp8v": Example(sealed_append.seal_kernel, {**_NVFP4, "UNIT": RESIDUAL_UNIT}, 8),
    "seal_fp8": Example(sealed_append.seal_kernel, {**_FP8, "UNIT": RESIDUAL_UNIT}, 8),
    "decode_bf16": Example(
        attention_decode.part_kernel,
        {**_PLAIN, "WIDE": 128, "PAGE": 32, "GROUP": 16, "MIN_PART": 128, "PARTS": 32,
         "SWAPPED": False, "OVERLAPS": False, "AHEAD": 0, "LINES": 2},
        num_stages=5,
    ),
    "decode_fp8": Example(sealed_decode.sealed_part_kernel, {**_FP8, **_PARTS}),
    "decode_nvfp4k_fp8v": Example(sealed_decode.sealed_part_kernel, {**_NVFP4, **_PARTS}),
    "decode_merge": Example(
        sealed_decode.sealed_merge_kernel,
        {"PAGE": 64, "MIN_PART": 4, "PARTS": 64, "DIM": 128, "HAS_SINKS": True, "LOG2": LOG2_E,
         "OVERLAPS": False},
    ),
    "prefill_fp8": Example(sealed_prefill.sealed_prefill_kernel, {**_FP8, **_ROWS}, 8),
    "prefill_nvfp4k_fp8v": Example(sealed_prefill.sealed_prefill_kernel, {**_NVFP4, **_ROWS}, 8),
    "prefill_tiles_bf16": TileExample(
        prefill_tma.flash_kernel, {**_TILES, "SEALED": False}, only="sm_90",
        types=dict.fromkeys(_LAID, "bf16"),
    ),
    "prefill_tiles_sealed": TileExample(
        prefill_tma.flash_kernel, {**_TILES, "SEALED": True}, only="sm_90",
        types=dict(zip(_LAID, ("fp16", "bf16", "fp16", "bf16"), strict=True)),
    ),
    "prefill_bf16": Example(
        attention_prefill.prefill_kernel,
        {k: v for k, v in {**_PLAIN, **_ROWS, "WIDE": 128, "PAGE": 32}.items() if k != "HAS_WINDOW"},
        8, num_stages=3,
    ),
}  # fmt: skip
