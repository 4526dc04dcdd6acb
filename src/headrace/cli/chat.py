"""``headrace chat``: a conversation in the terminal.

Answers stream, with Markdown drawn where standard output is a terminal. Ctrl-C stops the answer and
keeps what was said; at the prompt, twice in a row, it leaves. Sampling follows the model's own
generation_config where it has one, else the most likely token is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.cli.flags import (
    Commands,
    add_command,
    add_engine_flags,
    add_sampling_flags,
    engine_config,
    sampling_params,
)
from headrace.cli.markdown import AnswerPrinter, answer_printer
from headrace.cli.progress import loading_progress
from headrace.cli.reporting import configure_logging, note
from headrace.cli.session import Interrupts, Session, open_session
from headrace.core.errors import ContextLengthError, HeadraceError, UserError
from headrace.core.request import FinishReason, SamplingParams
from headrace.core.words import counted

HELP = """\
/help          this list
/reset         forget the conversation (the system message stays)
/system TEXT   set the system message and forget the conversation; without TEXT, show it
/save FILE     write the conversation: .json as messages, else Markdown
/exit          leave (ctrl-D does too)
ctrl-C stops an answer; twice at the prompt, it leaves."""


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "chat", "talk with a model in the terminal", run)
    add_engine_flags(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message (default: the model's)")
    parser.add_argument(
        "--plain", action="store_true", help="print answers without drawing Markdown"
    )
    add_sampling_flags(parser, "the model's own, or 0")


def model_sampling(generation_config: dict[str, Any]) -> SamplingParams:
    """What the model's authors recommend: generation_config.json; greedy where it says nothing."""
    if not generation_config.get("do_sample", "temperature" in generation_config):
        return SamplingParams(temperature=0.0)
    found = {
        name: generation_config[name]
        for name in ("temperature", "top_k", "top_p", "min_p")
        if generation_config.get(name) is not None
    }
    return SamplingParams(**found)


@dataclass
class Conversation:
    """Messages so far; the system message, if any, is kept apart so that a reset keeps it."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def messages(self) -> list[dict[str, str]]:
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, *self.turns]

    def save(self, path: Path) -> None:
        """Write the messages; an existing file is refused, never replaced."""
        if path.suffix == ".json":
            text = json.dumps(self.messages(), ensure_ascii=False, indent=2)
        else:
            text = "\n\n".join(f"**{m['role']}**\n\n{m['content']}" for m in self.messages())
        with path.open("x", encoding="utf-8") as file:
            file.write(text + "\n")


@dataclass
class Chat:
    """The loop's state. ``read`` returns a line or raises EOFError or KeyboardInterrupt."""

    session: Session
    sampling: SamplingParams
    conversation: Conversation
    printer: Callable[[], AnswerPrinter]
    read: Callable[[], str]
    leaving: bool = False

    def loop(self) -> None:
        interrupted = False
        while not self.leaving:
            try:
                line = self.read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if interrupted:
                    return
                interrupted = True
                note("ctrl-C again, ctrl-D or /exit leaves")
                continue
            interrupted = False
            try:
                if line.startswith("/"):
                    self.command(line)
                elif line:
                    self.answer(line)
            except UserError as error:
                note(f"error: {error.message}")
                if error.hint:
                    note(f"hint: {error.hint}")

    def command(self, line: str) -> None:
        """Carry out one line that starts with a slash."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/help":
            print(HELP, file=sys.stderr)
        elif name == "/exit":
            self.leaving = True
        elif name == "/reset":
            self.conversation.turns.clear()
            note("the conversation is empty")
        elif name == "/system" and rest:
            self.conversation = Conversation(system=rest)
            note("system message set; the conversation is empty")
        elif name == "/system":
            note(f"system message: {self.conversation.system or 'the one of the model'}")
        elif name == "/save" and rest:
            self.save(Path(rest).expanduser())
        elif name == "/save":
            note("error: /save needs a file name")
        else:
            note(f"error: there is no command {name}; /help lists them")

    def save(self, path: Path) -> None:
        try:
            self.conversation.save(path)
        except FileExistsError:
            note(f"error: {path} exists already; choose another name")
        except OSError as error:
            note(f"error: cannot write {path}: {error.strerror}")
        else:
            note(f"saved {counted(len(self.conversation.messages()), 'message')} to {path}")

    def answer(self, text: str) -> None:
        """Send one message and print the answer; a failed one leaves the conversation as it was."""
        self.conversation.turns.append({"role": "user", "content": text})
        try:
            ids = self.session.text.encode_chat(self.conversation.messages())
            reply, reason = self.stream(ids)
        except HeadraceError as error:
            self.conversation.turns.pop()
            if isinstance(error, ContextLengthError):
                raise ContextLengthError(
                    error.message,
                    hint="/reset starts a new conversation; --context sets a longer one",
                ) from error
            raise
        self.conversation.turns.append({"role": "assistant", "content": reply})
        if reason is FinishReason.CANCELLED:
            note("stopped")
        elif reason is FinishReason.LENGTH and self.sampling.max_tokens is None:
            note("the context is full; /reset starts a new conversation")

    def stream(self, ids: list[int]) -> tuple[str, FinishReason]:
        """Print the answer as it comes; returns its text and why it ended."""
        parts: list[str] = []
        reason: FinishReason | None = None
        with Interrupts().caught() as interrupts, self.printer() as printer:
            for delta in self.session.generate(ids, self.sampling, interrupts):
                parts.append(delta.text)
                printer.add(delta.text)
                reason = delta.finish_reason or reason
        return "".join(parts), reason or FinishReason.CANCELLED


def line_reader() -> Callable[[], str]:
    """``input`` with a prompt and line editing on a terminal, plain lines otherwise."""
    if not sys.stdin.isatty():

        def read_line() -> str:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line

        return read_line
    with contextlib.suppress(ImportError):  # Windows has none; its console edits lines itself
        importlib.import_module("readline")  # being imported, it gives input() history and editing
    return lambda: input("\n> ")


def run(args: argparse.Namespace) -> int:
    configure_logging(args.verbose)
    sampling_params(args, SamplingParams())  # complain before the model is loaded
    with loading_progress() as progress:
        session = open_session(engine_config(args), progress)
    try:
        if args.verbose:
            for choice in session.engine.info.choices:
                note(f"{choice.name} = {choice.value} ({choice.reason})")
        chat = Chat(
            session=session,
            sampling=sampling_params(args, model_sampling(session.text.generation_config)),
            conversation=Conversation(args.system),
            printer=answer_printer(plain=args.plain or not sys.stdout.isatty()),
            read=line_reader(),
        )
        if sys.stdin.isatty():
            note(
                f"{session.engine.info.model}, {counted(session.engine.info.context, 'token')}; /help"
            )
        chat.loop()
    finally:
        session.close()
    return 0
