"""Marks of a step on a GPU: how many there can be."""

import pytest
import torch

from headrace.core.errors import InternalError
from headrace.core.step import PIECE_ROWS
from headrace.experts.chunk_choice import CANDIDATES, with_slack
from tests.fixtures.triton_interpreter import needs_triton, only_interpreted

pytestmark = [needs_triton, only_interpreted]

# Norm, products of queries, keys and values, two norms of heads, two rotations, append, attention, output;
# norm and router; the norm twice more for what experts read.
OPERATIONS_OF_A_PIECE = 13


def test_the_longest_chunk_that_is_chosen_can_be_marked():
    """A watched prompt of Qwen3-30B's 48 layers, in pieces: a mark behind each operation of each piece."""
    from headrace.ops.triton.marks import StampMarks

    tokens = with_slack(CANDIDATES[-1], 10 * CANDIDATES[-1])
    count = 48 * (-(-tokens // PIECE_ROWS) * OPERATIONS_OF_A_PIECE + 1)
    marks = StampMarks(torch.device("cpu"))
    marks.begin()
    for _ in range(count):
        marks.point()
    assert len(marks.seconds(count)) == count


def test_more_marks_than_there_is_room_for_are_refused():
    from headrace.ops.triton.marks import StampMarks

    marks = StampMarks(torch.device("cpu"), most=2)
    marks.begin()
    marks.point()
    with pytest.raises(InternalError, match="more than 2 marks"):
        marks.point()
