"""Which back-end serves an operation, where operations are made of others."""

from __future__ import annotations

from headrace.ops.registry import BLOCKS, OP_NAMES, Op, resolve, whole_blocks


def served_by(**backends: str) -> dict[str, Op]:
    return {n: Op(n, backends.get(n, "one"), lambda: None, 0.0) for n in OP_NAMES}


def test_a_block_serves_only_with_all_its_parts() -> None:
    assert set(whole_blocks(served_by())) == set(OP_NAMES)
    assert set(OP_NAMES) - set(whole_blocks(served_by(attention_decode="two"))) == {
        "attention_block"
    }
    assert set(OP_NAMES) - set(whole_blocks(served_by(linear="two"))) == set(BLOCKS)
    assert set(OP_NAMES) - set(whole_blocks(served_by(moe="two"))) == set()


def test_every_back_end_here_serves_its_own_blocks() -> None:
    assert all(resolve(("reference",)).has(name) for name in BLOCKS)
