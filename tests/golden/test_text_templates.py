"""Rendered prompts against transformers' own rendering of the same template."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.checkpoint.records import TextSource
from headrace.text.template import ChatTemplate, encode_chat
from headrace.text.tokenizer import load_tokenizer
from tests.fixtures import chat_templates
from tests.fixtures.smollm2_text import smollm2_metadata
from tests.fixtures.tokenizer_texts import tokenizer_texts
from tests.fixtures.toy_tokenizer import write_toy_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter <für> einen Ort & 'mehr' \u2013 \u5929\u6c17",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich <3"}}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Grüße & <b>hi</b> \U0001f916"},
    {"role": "assistant", "content": " spaced \n"},
    {"role": "user", "content": "{{ not a template }} {% raw %}"},
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": TALK[:1],
    "three turns": TALK,
    "with system": [{"role": "system", "content": "Be brief.\nAlways."}, *TALK],
    "ends with the assistant": TALK[:2],
}
WITH_TOOLS: list[dict[str, Any]] = [
    *TALK[:1],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"t": 21}', "tool_call_id": "c1"},
]


def peer(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """What transformers renders."""
    rendered, _ = render_jinja_template([messages], chat_template=template, **TOKENS, **options)
    return rendered[0]


@pytest.mark.parametrize("style", sorted(chat_templates.ALL))
@pytest.mark.parametrize("talk", sorted(CONVERSATIONS))
@pytest.mark.parametrize("generate", [True, False])
def test_templates_render_as_in_transformers(style: str, talk: str, generate: bool) -> None:
    if style == "no_system" and talk == "with system":
        pytest.skip("the template refuses it; folding is tested elsewhere")
    template, messages = chat_templates.ALL[style], CONVERSATIONS[talk]
    ours = ChatTemplate(TextSource(chat_template=template, tokenizer_config=TOKENS))
    text = ours.render(messages, add_generation_prompt=generate)
    assert text == peer(template, messages, add_generation_prompt=generate)
    assert "Gr\u00fc\u00dfe & <b>hi</b>" in text


@pytest.mark.parametrize("style", ["llama3", "harmony"])
def test_tools_and_calls_render_as_in_transformers(style: str) -> None:
    template = chat_templates.ALL[style]
    ours = ChatTemplate(TextSource(chat_template=template, tokenizer_config=TOKENS))
    text = ours.render(WITH_TOOLS, tools=TOOLS)
    assert text == peer(template, WITH_TOOLS, tools=TOOLS, add_generation_prompt=True)
    assert '"Z\u00fcrich <3"' in text


def test_variables_and_reasoning_reach_the_template() -> None:
    messages = [*TALK[:1], {"role": "assistant", "content": "x", "reasoning_content": "hm"}]
    ours = ChatTemplate(TextSource(chat_template=chat_templates.HARMONY))
    text = ours.render(messages, add_generation_prompt=False, reasoning_effort="high")
    assert text == peer(
        chat_templates.HARMONY, messages, add_generation_prompt=False, reasoning_effort="high"
    )
    assert "Reasoning: high" in text
    assert "analysis<|message|>hm<|end|>" in text


@pytest.mark.parametrize("final", ["The answer is", "The answer is ", " padded", "x\n"])
@pytest.mark.parametrize("style", ["chatml", "llama3", "harmony", "strict", "no_system"])
def test_continued_final_messages_render_as_in_transformers(style: str, final: str) -> None:
    template = chat_templates.ALL[style]
    messages = [*TALK[:1], {"role": "assistant", "content": final}]
    ours = ChatTemplate(TextSource(chat_template=template, tokenizer_config=TOKENS))
    text = ours.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == peer(template, messages, continue_final_message=True)


def test_dates_json_and_loop_controls() -> None:
    template = (
        "{{ strftime_now('%Y') }}{% for m in messages %}{% if loop.index0 == 1 %}{% break %}"
        "{% endif %}{{ m | tojson(indent=2) }}"
        "{{ {'b': '\u00fc<>&', 'a': 1} | tojson(sort_keys=true) }}"
        "{% endfor %}"
    )
    text = ChatTemplate(TextSource(chat_template=template)).render(TALK)
    assert text == peer(template, TALK, add_generation_prompt=True)
    assert text.startswith(str(datetime.now().year))


def test_directories_tokenize_as_in_transformers(tmp_path: Path) -> None:
    source = write_toy_tokenizer(tmp_path, add_bos=True)
    ours = load_tokenizer(source)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in tokenizer_texts():
        ids = ours.encode(text, add_special=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special=False) == theirs.decode(
            ids, clean_up_tokenization_spaces=False
        )
        assert ours.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    assert source.chat_template is not None
    theirs.chat_template = source.chat_template
    ids = encode_chat(ours, ChatTemplate(source), TALK)
    expected = theirs.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)
    assert ids == [ours.bos_token_id, *expected]


@pytest.mark.smollm2
def test_smollm2_prompt_is_the_one_llama_cpp_gets() -> None:
    source = TextSource(gguf=smollm2_metadata())
    tokenizer, template = load_tokenizer(source), ChatTemplate(source)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert template.render(messages) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template.render(messages) == peer(
        source.gguf["tokenizer.chat_template"] if source.gguf else "",
        messages,
        add_generation_prompt=True,
    )
    ids = encode_chat(tokenizer, template, messages)
    # llama.cpp b11549 on the same text, add_special and parse_special true.
    assert ids == [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
        19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520,
        9531, 198,
    ]  # fmt: skip
