"""The generated page is fresh, and the table of formats agrees with the ``gguf`` package."""

from __future__ import annotations

from pathlib import Path

import gguf

from headrace.core.numeric import FORMATS
from scripts import docs_formats

ROOT = Path(__file__).parents[3]


def test_page_is_fresh() -> None:
    for path, text in docs_formats.pages().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, "run `make docs`"


def test_block_sizes_equal_gguf() -> None:
    for fmt in FORMATS.values():
        if fmt.gguf_type is not None:
            qtype = gguf.GGMLQuantizationType(fmt.gguf_type)
            assert gguf.GGML_QUANT_SIZES[qtype] == (fmt.block_weights, fmt.block_nbytes)
            assert qtype.name.lower() == fmt.name.removesuffix("_gguf")
