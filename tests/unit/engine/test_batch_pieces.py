"""Long batches in pieces: where they are cut, by hand, and that the model's rows stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.checkpoint.open import open_checkpoint
from headrace.core.kv_formats import FORMATS, pool_shape
from headrace.core.step import ScheduledChunk
from headrace.engine.batch import build_batch
from headrace.kv.storage import allocate_cache, open_pages_of
from headrace.layers.moe import InMemoryExperts
from headrace.machine.device import HostDevice
from headrace.models.loader import load_model
from headrace.ops.records import Activation, SealedKV
from headrace.ops.registry import resolve
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.tiny_models import make_model, prompt, save_model

CPU = torch.device("cpu")


def _chunk(seq: int, start: int, count: int, blocks: range) -> ScheduledChunk:
    return ScheduledChunk(seq, tuple(range(count)), start, tuple(blocks), sample=True)


def test_pieces_end_at_whole_pages_and_hold_every_row_once() -> None:
    chunks = [_chunk(1, 40, 1, range(3)), _chunk(2, 100, 500, range(10, 50))]
    tokens, batch = build_batch(chunks, 16, CPU, piece_rows=200)
    assert tokens.shape == (501,)
    # Row 1 decodes; of the other sequence positions 100 to 599: 199 rows more would end at 299, so at 256;
    # then 200 at most, to 384 and to 512 and the rest.
    assert [piece.query_start.tolist() for piece in batch.pieces] == [
        [0, 1, 157],
        [0, 128],
        [0, 128],
        [0, 88],
    ]
    assert [piece.context_lens.tolist() for piece in batch.pieces] == [
        [41, 256],
        [384],
        [512],
        [600],
    ]
    assert not any(piece.decode or piece.pieces for piece in batch.pieces)
    for name in ("positions", "slots"):
        rows = torch.cat([getattr(piece, name) for piece in batch.pieces])
        assert torch.equal(rows, getattr(batch, name))
    assert build_batch(chunks, 16, CPU, piece_rows=501)[1].pieces == ()


def test_a_piece_that_begins_close_to_a_pages_end_is_not_empty() -> None:
    _, batch = build_batch([_chunk(1, 120, 300, range(30))], 16, CPU, piece_rows=130)
    assert [piece.positions.shape[0] for piece in batch.pieces] == [8, 128, 128, 36]


def test_open_pages_are_those_of_the_whole_chunk() -> None:
    shape = pool_shape(FORMATS["fp8"], 20, 32, max_num_seqs=2, max_batch_tokens=512)
    spec = open_checkpoint("tiny").spec
    pages = open_pages_of(allocate_cache(spec, shape, "fp8", CPU, None), lambda _: True)
    chunk = _chunk(1, 0, 300, range(20))
    whole = build_batch([chunk], 32, CPU, pages, piece_rows=300)[1].open
    cut = build_batch([chunk], 32, CPU, pages, piece_rows=150)[1].pieces
    assert [piece.positions.shape[0] for piece in cut] == [128, 128, 44]
    assert whole is not None
    for name, dim in (("rows", 0), ("seals", 0), ("pages", 1)):
        found = torch.cat([getattr(piece.open, name) for piece in cut], dim)
        assert torch.equal(found, getattr(whole, name))
    assert [len(piece.open.seals) for piece in cut] == [4, 4, 1]  # the tenth page is not full


class _Long(InMemoryExperts):
    """Takes long chunks, too, and remembers which."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.seen = []

    def add_to(self, layer, x, ids, weights, out) -> None:
        self.seen.append((layer, ids.shape[0]))
        whole = x(slice(0, ids.shape[0]))
        out += self(layer, whole, ids, weights)


@pytest.mark.parametrize("kv_format", ["f32", "fp8"])
@pytest.mark.parametrize("long", [False, True])
def test_a_model_computes_the_same_rows(tmp_path: Path, kv_format: str, long: bool) -> None:
    """A dense layer and mixtures; a decoding row beside two chunks, one of them behind a past."""
    checkpoint = open_checkpoint(str(save_model(make_model("qwen3_moe"), tmp_path)))
    ops, made = resolve(("reference",)), []

    def factory(spec, experts):
        made.append(_Long(ops, experts, Activation(spec.activation)))
        return made[0]

    decoder = load_model(
        checkpoint, ops, HostDevice(), max_positions=512, executor_factory=factory if long else None
    )
    work = [
        [_chunk(1, 0, 37, range(12)), _chunk(2, 0, 20, range(12, 24))],
        [
            _chunk(1, 37, 1, range(12)),
            _chunk(2, 20, 250, range(12, 24)),
            _chunk(3, 0, 70, range(24, 27)),
        ],
    ]
    found = []
    for rows in (1000, 130):
        shape = pool_shape(FORMATS[kv_format], 30, 32, max_num_seqs=4, max_batch_tokens=512)
        caches = allocate_cache(checkpoint.spec, shape, kv_format, CPU, None)
        pages = open_pages_of(caches, lambda _: True)
        assert isinstance(caches[0], SealedKV) == (kv_format == "fp8")
        for chunks in work:
            if pages is not None:
                pages.next_step()
            _, batch = build_batch(chunks, 32, CPU, pages, piece_rows=rows)
            ids = torch.tensor(prompt(sum(len(c.token_ids) for c in chunks)))
            hidden = decoder.forward(ids, batch, caches)
        found.append(hidden)
    assert hidden.shape[0] == 321
    assert batch.pieces
    assert (found[0] - found[1]).abs().max() < 1e-5 * found[0].abs().max()
    if long:
        assert made[0].seen == [(0, 321), (1, 321)]
