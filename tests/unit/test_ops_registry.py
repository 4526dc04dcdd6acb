"""Which back-end serves an operation, where operations are made of others."""

from __future__ import annotations

from headrace.ops.registry import BLOCKS, OP_NAMES, OPTIONAL, Op, OpSet, resolve, whole_blocks


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
    assert all(resolve(("reference",)).has(name) for name in BLOCKS if name not in OPTIONAL)


def test_watched_operations_tell_their_times_and_are_themselves_again():
    seen: list[tuple[str, tuple[object, ...], float]] = []

    def block(x: int, seconds: object = None) -> int:
        if seconds is not None:
            seconds[1] += 0.25  # type: ignore[index]
        return x + 1

    def plain(x: int) -> int:
        return 2 * x

    ops = OpSet(
        {
            "linear": Op("linear", "toy", plain, 0.0),
            "rope": Op("rope", "toy", plain, 0.0),
            "dense_block": Op("dense_block", "toy", block, 0.0, times_parts=True),
        }
    )
    assert ops.linear is plain
    times = ops.watch(lambda name, args, s: seen.append((name, args, s)))
    assert (ops.linear(4), ops.dense_block(4), ops.dense_block(5), ops.rope(3)) == (8, 5, 6, 6)
    assert ops.watch(None) == {}
    assert ops.linear is plain
    assert ops.dense_block(1) == 2
    assert [(name, args) for name, args, _ in seen] == [("linear", (4,))]
    assert all(s >= 0 for _, _, s in seen)
    # A block adds up its parts, and what its calls took around them.
    assert set(times) == {"dense_block", "rope"}
    assert times["rope"].take()[::2] == (1, [])
    calls, seconds, parts = times["dense_block"].take()
    assert (calls, parts) == (2, [0.0, 0.5, 0.0])
    assert seconds >= 0
    assert times["dense_block"].take() == (0, 0.0, [0.0, 0.0, 0.0])
