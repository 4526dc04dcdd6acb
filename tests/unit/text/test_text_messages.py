"""Messages as clients send them: what is accepted, what is refused, what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import RequestError
from headrace.text.messages import fold_systems, normalise_messages, parse_arguments


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def one(message: dict[str, Any], **options: bool) -> dict[str, Any]:
    return normalise_messages([message], **options)[0]


def calling(arguments: object) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_plain_messages_stay_as_they_are_and_are_copied() -> None:
    messages = [system("s"), user("u"), {**assistant("a"), "name": "n"}]
    result = normalise_messages(messages)
    assert result == messages
    result[0]["content"] = "changed"
    assert messages[0]["content"] == "s"


def test_text_parts_are_joined_by_newlines_and_null_is_empty() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    assert one({"role": "user", "content": parts})["content"] == "a\nb\nc"
    assert one({"role": "assistant", "content": None})["content"] == ""
    assert one({"role": "assistant"})["content"] == ""
    assert one({"role": "user", "content": []})["content"] == ""


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_b151_parts_that_are_not_text_are_refused_by_name(kind: str) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "http://x.invalid"}}]
    with pytest.raises(RequestError, match=rf"messages\[1\]\.content\[1\].*'{kind}'.*text only"):
        normalise_messages([user("hi"), {"role": "user", "content": parts}])


def test_b038_developer_is_system_unless_the_template_knows_it() -> None:
    message = {"role": "developer", "content": "rules"}
    assert one(message)["role"] == "system"
    assert one(message, has_developer_role=True)["role"] == "developer"


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] is str"),
        ([{"content": "x"}], r"messages\[0\]\.role is None"),
        ([{"role": "robot", "content": "x"}], r"role is 'robot'; known roles are system, dev"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content is missing"),
        ([user("a"), {"role": "tool", "content": None}], r"messages\[1\]\.content is missing"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content is int"),
        ([{"role": "user", "content": [3]}], r"content\[0\] is no content part"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text is NoneType"),
        ([{**assistant(""), "tool_calls": 3}], r"tool_calls is int"),
        ([{**assistant(""), "tool_calls": [{}]}], r"tool_calls\[0\]\.function is missing"),
        ([{**assistant(""), "tool_calls": [{"function": {}}]}], r"function\.name is missing"),
        ([{**assistant(""), "reasoning": 1}], r"messages\[0\]\.reasoning is int"),
        ([{**assistant(""), "reasoning": "a", "thinking": "b"}], "reasoning and thinking"),
    ],
)
def test_malformed_messages_are_refused_and_the_place_is_named(messages: Any, where: str) -> None:
    with pytest.raises(RequestError, match=where) as caught:
        normalise_messages(messages)
    assert caught.value.param == "messages"


def test_b036_arguments_as_text_or_object_are_one_object() -> None:
    for arguments in ('{"a": 1}', {"a": 1}, ' {"a":1} '):
        call = one(calling(arguments))["tool_calls"][0]
        assert call["function"] == {"name": "f", "arguments": {"a": 1}}
        assert call["id"] == "c1"
    for nothing in ("", None, {}, "{}"):
        assert one(calling(nothing))["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("levels", [101, 100_000])
def test_b036_arguments_that_nest_too_deeply_are_refused(levels: int) -> None:
    text = "[" * (levels - 1) + "]" * (levels - 1)
    with pytest.raises(RequestError, match=r"arguments has lists .* more than 100 levels deep"):
        one(calling('{"a": ' + text + "}"))
    fine = one(calling('{"a": ' + "[" * 99 + "]" * 99 + "}"))["tool_calls"][0]["function"]
    assert len(str(fine["arguments"])) == len("{'a': }") + 2 * 99


@pytest.mark.parametrize("bad", ["{a: 1}", '{"a": 1', "[1]", "3", '"text"', 7, [1]])
def test_b036_arguments_that_are_no_json_object_are_refused(bad: object) -> None:
    with pytest.raises(RequestError, match=r"tool_calls\[0\]\.function\.arguments"):
        one(calling(bad))
    with pytest.raises(RequestError, match="where"):
        parse_arguments(bad, "where")


def test_null_tool_calls_are_no_tool_calls() -> None:
    assert "tool_calls" not in one({**assistant("x"), "tool_calls": None})


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_history_is_there_under_every_name(name: str) -> None:
    message = one({**assistant("x"), name: "because"})
    assert {message[n] for n in ("reasoning_content", "reasoning", "thinking")} == {"because"}
    assert "thinking" not in one({**assistant("x"), name: None})


def test_b037_systems_at_the_start_become_one() -> None:
    messages = [system("a"), system("b"), user("u")]
    assert fold_systems(messages, keep_leading=True) == [system("a\n\nb"), user("u")]
    assert fold_systems(messages, keep_leading=False) == [user("a\n\nb\n\nu")]


def test_b037_a_later_system_goes_into_the_user_message_behind_it() -> None:
    messages = [system("s"), user("u"), assistant("a"), system("x"), system("y"), user("v")]
    head = [system("s"), user("u"), assistant("a")]
    assert fold_systems(messages, keep_leading=True) == [*head, user("x\n\ny\n\nv")]


def test_b037_a_later_system_without_a_user_message_behind_it() -> None:
    assert fold_systems([user("u"), system("x")], keep_leading=True) == [user("u\n\nx")]
    assert fold_systems([user("u"), assistant("a"), system("x")], keep_leading=True) == [
        user("u"), assistant("a"), user("x"),
    ]  # fmt: skip
    assert fold_systems([user("u"), system("x"), assistant("a")], keep_leading=True) == [
        user("u\n\nx"), assistant("a"),
    ]  # fmt: skip
    assert fold_systems([system("only")], keep_leading=False) == [user("only")]


def test_folding_keeps_every_text_in_order() -> None:
    messages = [system("1"), user("2"), system("3"), assistant("4"), system("5"), user("6")]
    for keep in (True, False):
        folded = fold_systems(messages, keep_leading=keep)
        joined = "\n\n".join(m["content"] for m in folded)
        assert joined.split("\n\n") == list("123456")
        assert not any(m["role"] == "system" for m in folded[1:])
