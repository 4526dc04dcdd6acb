"""``headrace chat`` over a scripted engine and scripted lines."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.chat import Chat, Conversation, model_sampling
from headrace.cli.markdown import GrowingBlock, MarkdownPrinter, PlainPrinter, split_finished
from headrace.core.request import FinishReason, SamplingParams
from tests.fixtures.fake_engine import FakeEngine, FakeText, fake_session


def lines(*script: str | type[BaseException]) -> Callable[[], str]:
    """Reads the script, then the end of input."""
    remaining = list(script)

    def read() -> str:
        if not remaining:
            raise EOFError
        item = remaining.pop(0)
        if isinstance(item, str):
            return item
        raise item

    return read


def talk(
    engine: FakeEngine, *script: str | type[BaseException], text: FakeText | None = None
) -> Chat:
    chat = Chat(
        session=fake_session(engine, text),
        sampling=SamplingParams(temperature=0.0),
        conversation=Conversation(),
        printer=PlainPrinter,
        read=lines(*script),
    )
    chat.loop()
    return chat


def test_turns_are_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    text = FakeText()
    talk(FakeEngine(["Hel", "lo"]), "hi", "", "again", text=text)
    assert capsys.readouterr().out == "Hello\nHello\n"
    assert text.seen[1] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "again"},
    ]


def test_system_and_reset() -> None:
    text = FakeText()
    talk(FakeEngine(["x"]), "one", "/system Be brief.", "two", "/reset", "three", text=text)
    system = {"role": "system", "content": "Be brief."}
    assert text.seen[1] == [system, {"role": "user", "content": "two"}]
    assert text.seen[2] == [system, {"role": "user", "content": "three"}]


def test_exit_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(["x"])
    talk(engine, "/fly", "/help", "/exit", "never sent")
    err = capsys.readouterr().err
    assert "no command /fly" in err
    assert "/save FILE" in err
    assert engine.requests == []


def test_ctrl_c_stops_the_answer_and_not_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    pressed: list[int] = []

    def press(step: int) -> None:
        if step == 1 and not pressed:
            pressed.append(step)
            signal.raise_signal(signal.SIGINT)

    text = FakeText()
    talk(FakeEngine(["a", "b", "c"], before_step=press), "go", "go on", text=text)
    out, err = capsys.readouterr()
    assert out == "ab\nabc\n"
    assert "stopped" in err
    assert text.seen[1][1] == {"role": "assistant", "content": "ab"}


def test_ctrl_c_twice_at_the_prompt_leaves() -> None:
    engine = FakeEngine(["x"])
    talk(engine, KeyboardInterrupt, "still here", KeyboardInterrupt, KeyboardInterrupt, "gone")
    assert len(engine.requests) == 1


def test_context_overflow_says_reset_and_forgets_the_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat = talk(FakeEngine(["x"], context=4), "one two", "three four five six")
    err = capsys.readouterr().err
    assert "the context holds 4" in err
    assert "/reset" in err
    assert [m["content"] for m in chat.conversation.turns] == ["one two", "x"]


def test_an_answer_cut_by_the_context_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    talk(FakeEngine(["x"], finish=FinishReason.LENGTH), "hi")
    assert "the context is full; /reset" in capsys.readouterr().err


def test_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "talk.json"
    talk(FakeEngine(["héllo"]), "hi", f"/save {file}", f"/save {file}", "/save")
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert saved == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "héllo"},
    ]
    err = capsys.readouterr().err
    assert "exists already" in err
    assert "needs a file name" in err


def test_save_where_nothing_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(FakeEngine(["x"]), f"/save {tmp_path / 'no' / 'such' / 'folder.md'}")
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingParams(temperature=0.0)),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams(temperature=0.0)),
        ({"temperature": 0.6, "top_k": 20}, SamplingParams(temperature=0.6, top_k=20)),
        ({"do_sample": True, "top_p": 0.9}, SamplingParams(temperature=1.0, top_p=0.9)),
    ],
)
def test_model_sampling(config: dict[str, Any], expected: SamplingParams) -> None:
    assert model_sampling(config) == expected


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one line", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\n", ""),  # what follows may still be a list item
        ("- a\n\n- b\n\nend", "- a\n\n- b\n\n"),
        ("```\na\n\nb\n", ""),
        ("```py\na\n\nb\n```\n\nend", "```py\na\n\nb\n```\n\n"),
        ("~~~\n```\n\nx\n~~~\n\nend", "~~~\n```\n\nx\n~~~\n\n"),
    ],
)
def test_finished_markdown_blocks(text: str, finished: str) -> None:
    assert split_finished(text) == (finished, text[len(finished) :])


def test_markdown_is_drawn_whole_whatever_the_chunks() -> None:
    from rich.console import Console

    text = "# Title\n\nSome **bold** text.\n\n- one\n- two\n\n```py\nx = 1\n\ny = 2\n```\n"
    drawn: list[str] = []
    for size in (1, 3, len(text)):
        output = io.StringIO()
        console = Console(file=output, width=40)
        with MarkdownPrinter(console) as printer:
            for i in range(0, len(text), size):
                printer.add(text[i : i + size])
        drawn.append(output.getvalue())
    for shown in drawn:
        for part in ("Title", "Some bold text.", "one", "two", "x = 1", "y = 2"):
            assert shown.count(part) == 1


def test_a_block_taller_than_the_screen_shows_its_end_while_it_grows() -> None:
    from rich.console import Console

    output = io.StringIO()
    console = Console(file=output, width=40, height=10)
    console.print(GrowingBlock("\n".join(f"- item {i}" for i in range(30))))
    shown = output.getvalue()
    assert "item 29" in shown
    assert "item 0" not in shown
    assert len(shown.splitlines()) <= 10
