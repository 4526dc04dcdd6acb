"""The plan kernel decides what the oracle decides, over random routing and cache states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.experts import plan_oracle as oracle
from headrace.experts.request_block import request_block
from tests.fixtures.triton_interpreter import DEVICE, needs_triton

pytestmark = needs_triton

CHUNK_NBYTES = 8 * 2048
PROGRAMS = 2  # few, for the interpreter


@st.composite
def cases(draw: st.DrawFn) -> dict[str, object]:
    experts, slices = draw(st.integers(2, 9)), draw(st.integers(1, 5))
    top_k = draw(st.integers(1, min(4, experts)))
    tokens = draw(st.sampled_from([1, 2, 3, 5]))
    max_fetch = draw(st.integers(0, 8))
    shape = oracle.PlanShape(
        num_layers=draw(st.integers(1, 4)),
        num_experts=experts,
        num_slices=slices,
        num_slots=draw(st.integers(0, 20)),
        max_fetch=max_fetch,
        window=draw(st.sampled_from([2, 3, 5, 16])),
        max_prefetch=draw(st.sampled_from([0, 1, 2, 4, 8])) if max_fetch else 0,
    )
    most = min(tokens * top_k, experts) * slices
    split = [draw(st.integers(0, m)) for m in range(most + 1)]
    chosen = st.lists(st.integers(-1, experts - 1), min_size=top_k, max_size=top_k, unique=True)
    routes = st.lists(chosen, min_size=tokens, max_size=tokens)
    steps = draw(st.lists(routes, min_size=2, max_size=8))
    sure = st.lists(st.integers(0, experts - 1), min_size=top_k, max_size=top_k, unique=True)
    guess = st.lists(sure | st.just([-1] * top_k), min_size=tokens, max_size=tokens)
    return {
        "shape": shape, "split": split, "steps": steps, "top_k": top_k, "tokens": tokens,
        "full": draw(st.booleans()),
        "guesses": draw(st.lists(st.none() | guess, min_size=1, max_size=5)),
        "arrived": draw(st.lists(st.integers(0, 20), min_size=1, max_size=5)),
    }  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(cases())
def test_the_kernel_decides_what_the_oracle_decides(case: dict) -> None:
    _replay(**case)


def test_sixteen_tokens_of_eight_experts() -> None:
    generator = torch.Generator().manual_seed(4)
    shape = oracle.PlanShape(2, 128, 4, 60, 32, 256)
    steps = [
        torch.rand(16, 128, generator=generator).topk(8).indices.tolist() for _ in range(4)
    ]  # fmt: skip
    guesses = [steps[1], None, steps[0]]
    shape = replace(shape, max_prefetch=16)
    _replay(shape, [m // 3 for m in range(128 * 4 + 1)], steps, 8, 16, False, guesses, [7, 40])


def _replay(
    shape: oracle.PlanShape,
    split: list[int],
    steps: list[list[list[int]]],
    top_k: int,
    tokens: int,
    full: bool = False,
    guesses: Sequence[list[list[int]] | None] = (None,),
    arrived: Sequence[int] = (0,),
) -> None:
    """Every layer's plan; before it, what ``guesses`` in turn says is prefetched, unless it is None, and
    of that the next number of ``arrived`` chunks is there."""
    from headrace.ops.triton import expert_state
    from headrace.ops.triton.expert_prefetch import PrefetchLauncher

    tables = oracle.new_tables(shape)
    where = request_block(
        max_tokens=tokens, top_k=top_k, num_experts=shape.num_experts,
        num_slices=shape.num_slices, hidden=8,
    )  # fmt: skip
    request = tuple(
        at // 4 for at in (where.header, where.items, where.pair_token, where.pair_weight)
    )
    geometry = expert_state.PlanGeometry(
        shape.num_layers, shape.num_experts, shape.num_slices, shape.num_slots, shape.max_fetch,
        shape.window, tokens, top_k, request, shape.max_prefetch, 3 * CHUNK_NBYTES,
        prefetch_programs=PROGRAMS,
    )  # fmt: skip
    block = torch.zeros(where.nbytes // 4, dtype=torch.int32)
    if DEVICE.type == "cuda":
        block = block.pin_memory()
    state = expert_state.new_plan_state(geometry, tables.constants.table(), DEVICE, block)
    if full:
        _fill(shape, tables, state)
    state.split[:, : len(split)] = torch.tensor(split, dtype=torch.int32)
    host = torch.zeros(shape.num_experts * shape.num_slices * 3 * CHUNK_NBYTES, dtype=torch.uint8)
    host = host.pin_memory() if DEVICE.type == "cuda" else host
    launcher = PrefetchLauncher(
        state,
        torch.zeros(shape.all_slots * 3 * CHUNK_NBYTES, dtype=torch.uint8, device=DEVICE),
        torch.full((shape.num_layers,), host.data_ptr(), dtype=torch.int64, device=DEVICE),
        [3 * CHUNK_NBYTES] * shape.num_layers,
    )
    seq = 0
    for number, ids in enumerate(steps):
        oracle.begin_step(shape, tables)
        expert_state.start_step(state)
        _compare_values(state, tables)
        if shape.max_fetch and shape.num_slots:
            assert state.victims.tolist() == tables.victims
        for layer in range(shape.num_layers):
            rows = ids if layer == 0 else steps[(number * 3 + 1) % len(steps)]
            weights = [[(0.5 + t + j) / 8 for j in range(top_k)] for t in range(tokens)]
            at = number * shape.num_layers + layer
            ahead = oracle.NOTHING_PREFETCHED
            guess = guesses[at % len(guesses)] if shape.max_prefetch else None
            if guess is not None:
                items = oracle.foresee(shape, tables, layer, guess)
                ahead = oracle.Prefetched(items, arrived[at % len(arrived)], 3)
                launcher.prefetch(layer, _logits(guess, shape), top_k, _valid(guess))
                _compare_choice(state, ahead, shape)
                state.arrived.zero_()
                state.arrived[number % PROGRAMS] = ahead.arrived
            plan = oracle.plan_layer(shape, tables, layer, rows, weights, split, ahead)
            expert_state.plan_layer(
                state, layer,
                torch.tensor(rows, dtype=torch.int32, device=DEVICE),
                torch.tensor(weights, device=DEVICE),
            )  # fmt: skip
            _compare(state, plan, shape)
            _compare_tables(state, tables)
            seq += bool(plan.cpu)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            assert int(block[0]) == seq
            if plan.cpu:
                _compare_request(block, request, plan, layer, tokens)
    assert int(state.totals[3]) == len(steps) * shape.num_layers


def _fill(shape: oracle.PlanShape, tables: oracle.CacheTables, state: object) -> None:
    """All slots owned before the first step, from the last key down."""
    keys = range(shape.num_layers * shape.num_experts * shape.num_slices)
    for slot, key in enumerate(list(reversed(keys))[: shape.num_slots]):
        tables.slot_of[key], tables.owner_of[slot] = slot, key
    state.slot_of.copy_(torch.tensor(tables.slot_of, dtype=torch.int32))
    if shape.num_slots:
        state.owner_of.copy_(torch.tensor(tables.owner_of, dtype=torch.int32))


def _logits(guess: list[list[int]], shape: oracle.PlanShape) -> torch.Tensor:
    """Of which these are the top k, in this order."""
    logits = torch.full((len(guess), shape.num_experts), -1.0)
    for row, experts in zip(logits, guess):
        for place, expert in enumerate(experts if experts[0] >= 0 else ()):
            row[expert] = 0.25 - place / 8
    return logits.to(DEVICE)


def _valid(guess: list[list[int]]) -> torch.Tensor:
    return torch.tensor([row[0] >= 0 for row in guess], device=DEVICE)


def _entries(entries: tuple[oracle.Entry, ...], shape: oracle.PlanShape) -> list[list[int]]:
    return [
        [e.slot, e.expert * shape.num_slices + e.slice_index, e.first_pair, e.num_pairs]
        for e in entries
    ]  # fmt: skip


def _compare(state: object, plan: oracle.LayerPlan, shape: oracle.PlanShape) -> None:
    counts = state.counts.tolist()
    assert counts[:6] == [
        len(plan.hits), len(plan.fetches), len(plan.cpu), len(plan.pairs), plan.num_missing,
        sum(plan.admitted),
    ]  # fmt: skip
    assert state.hits[: counts[0]].tolist() == _entries(plan.hits, shape)
    assert state.fetches[: counts[1]].tolist() == _entries(plan.fetches, shape)
    assert state.pair_of.tolist() == list(plan.pair_of)
    if shape.max_prefetch:
        assert state.origins[: counts[1]].tolist() == list(plan.origins)
        free = [-1] * (shape.max_prefetch - len(plan.homes))
        assert state.homes.tolist() == [*plan.homes, *free]
        assert int(state.state[8]) == sum(1 << place for place in plan.origins if place >= 0)
    pairs = len(plan.pairs)
    assert state.pair_token[:pairs].tolist() == [token for token, _ in plan.pairs]
    assert state.pair_weight[:pairs].tolist() == [weight for _, weight in plan.pairs]
    here = [0] * pairs
    for entry in (*plan.hits, *plan.fetches):
        for pair in range(entry.first_pair, entry.first_pair + entry.num_pairs):
            here[pair] |= 1 << entry.slice_index
    assert state.on_gpu[:pairs].tolist() == here


def _compare_choice(state: object, ahead: oracle.Prefetched, shape: oracle.PlanShape) -> None:
    count = int(state.state[7])
    items = [divmod(index, shape.num_slices) for index in state.foreseen[0, :count].tolist()]
    assert tuple(items) == ahead.items
    places = {e * shape.num_slices + s: place for place, (e, s) in enumerate(ahead.items)}
    size = shape.num_experts * shape.num_slices
    assert state.place_of.tolist() == [places.get(index, -1) for index in range(size)]
    assert int(state.arrived.sum()) == 3 * count


def _compare_tables(state: object, tables: oracle.CacheTables) -> None:
    assert state.slot_of.tolist() == tables.slot_of
    assert state.owner_of.tolist()[: len(tables.owner_of)] == tables.owner_of
    _compare_values(state, tables)
    assert state.last_use.tolist() == tables.last_use
    if state.geometry.max_fetch:
        found = state.state.tolist()
        assert (found[0], found[1], found[4]) == (tables.now, tables.cursor, tables.free)


def _compare_values(state: object, tables: oracle.CacheTables) -> None:
    """Bit for bit."""
    assert state.counters.tolist() == [list(f) for f in tables.counters]
    assert state.values.tolist() == list(tables.values)


def _compare_request(
    block: torch.Tensor, at: tuple[int, ...], plan: oracle.LayerPlan, layer: int, tokens: int
) -> None:
    header, items, pair_token, pair_weight = at
    assert block[header : header + 4].tolist() == [layer, tokens, len(plan.cpu), len(plan.pairs)]
    found = block[items : items + 4 * len(plan.cpu)].view(-1, 4).tolist()
    assert found == [[c.expert, c.slice_index, c.first_pair, c.num_pairs] for c in plan.cpu]
    count = len(plan.pairs)
    assert block[pair_token : pair_token + count].tolist() == [token for token, _ in plan.pairs]
    found = block[pair_weight : pair_weight + count].view(torch.float32).tolist()
    assert found == [weight for _, weight in plan.pairs]
