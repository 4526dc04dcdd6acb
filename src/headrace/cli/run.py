"""``headrace run``: one answer to standard output.

Without sampling flags the most likely token is taken each time, so that the same command prints the
same answer again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from headrace.cli.exit_codes import EXIT_INTERRUPTED
from headrace.cli.flags import (
    Commands,
    add_command,
    add_engine_flags,
    add_sampling_flags,
    engine_config,
    sampling_params,
)
from headrace.cli.outputs import check_output
from headrace.cli.progress import loading_progress
from headrace.cli.reporting import configure_logging, note
from headrace.cli.routing_log import RoutingLog, experts_of, save_routing
from headrace.cli.session import Interrupts, Session, open_session
from headrace.core.errors import ConfigError, RequestError
from headrace.core.request import FinishReason, OutputDelta, SamplingParams
from headrace.core.words import counted
from headrace.engine.plan_caution import caution

GREEDY = SamplingParams(temperature=0.0)


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "run", "answer one prompt", run)
    add_engine_flags(parser)
    parser.add_argument(
        "-p", "--prompt", metavar="TEXT", help="the prompt; - or nothing reads standard input"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message (default: the model's)")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without a chat template"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with text, tokens and timings"
    )
    parser.add_argument(
        "--routing",
        type=Path,
        metavar="FILE",
        help="write which experts each token was routed to, for `headrace plan --routing`",
    )
    add_sampling_flags(parser, "0")


@dataclass
class Answer:
    """What was generated and when; times in seconds from submission."""

    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None

    def add(self, delta: OutputDelta, now_s: float) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.finish_reason = delta.finish_reason or self.finish_reason
        if delta.usage is not None:
            self.cached_tokens = delta.usage.cached_tokens
        if delta.token_ids:
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s

    def as_json(self, prompt_tokens: int, load_s: float) -> dict[str, object]:
        """The object that ``--json`` prints; rates are None where there was nothing to time."""
        computed, later = prompt_tokens - self.cached_tokens, len(self.token_ids) - 1
        decode_s = (self.last_s or 0.0) - (self.first_s or 0.0)
        return {
            "text": "".join(self.texts),
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "prompt_tokens": prompt_tokens,
            "timings": {
                "load_s": round(load_s, 4),
                "ttft_s": None if self.first_s is None else round(self.first_s, 4),
                "prefill_tok_s": round(computed / self.first_s, 2) if self.first_s else None,
                "decode_tok_s": round(later / decode_s, 2) if decode_s > 0 else None,
            },
        }


def read_stdin() -> str:
    """All of standard input, which must be UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"standard input is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}",
            hint="convert it with iconv",
            param="--prompt",
        ) from None


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from ``-p`` or standard input.

    Raises:
        ConfigError: there is none, or it is not text.
    """
    if args.prompt is None and sys.stdin.isatty():
        raise ConfigError("there is no prompt", hint='give -p "your question"', param="--prompt")
    prompt: str = read_stdin() if args.prompt in (None, "-") else args.prompt
    for flag, text in (("--prompt", prompt), ("--system", args.system or "")):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ConfigError(f"{flag} is not valid UTF-8", param=flag) from None
    if not prompt:
        raise ConfigError("the prompt is empty", hint='give -p "your question"', param="--prompt")
    return prompt


def prompt_token_ids(session: Session, args: argparse.Namespace, prompt: str) -> list[int]:
    """Token ids through the chat template, or of the plain text with ``--raw``."""
    if args.raw:
        return session.text.encode(prompt)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return session.text.encode_chat([*system, {"role": "user", "content": prompt}])


def run(args: argparse.Namespace) -> int:
    configure_logging(args.verbose)
    if args.raw and args.system is not None:
        raise ConfigError(
            "--system needs the chat template, and --raw leaves it out",
            hint="drop one of them",
            param="--system",
        )
    sampling = sampling_params(args, GREEDY)
    prompt = read_prompt(args)
    log, experts = RoutingLog(), 0
    routing: Path | None = args.routing
    if routing is not None:
        check_output(routing, "--routing")
        experts = experts_of(args.model)
    with loading_progress() as progress:
        session = open_session(engine_config(args), progress)
    try:
        if args.verbose:
            print_choices(session)
        if routing is not None:
            session.engine.watch_routing(log)
        code = answer_prompt(session, args, prompt, sampling)
        if routing is not None:
            save_routing(log, routing, args.model, prompt, experts)
            note(f"the routing of {counted(log.num_tokens, 'token')} is in {routing}")
            few = caution(log.num_tokens)
            if few is not None:
                note(few)
        return code
    finally:
        session.close()


def print_choices(session: Session) -> None:
    """What the engine chose, one line each with the reason, to standard error."""
    for choice in session.engine.info.choices:
        note(f"{choice.name} = {choice.value} ({choice.reason})")


def answer_prompt(
    session: Session, args: argparse.Namespace, prompt: str, sampling: SamplingParams
) -> int:
    """Generate, print, and return the exit code."""
    ids = prompt_token_ids(session, args, prompt)
    if not ids:
        raise RequestError("the prompt has no tokens", hint="give some text")
    answer = Answer()
    with Interrupts().caught() as interrupts:
        start = time.perf_counter()
        for delta in session.generate(ids, sampling, interrupts):
            answer.add(delta, time.perf_counter() - start)
            if not args.json and delta.text:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
    if args.json:
        print(json.dumps(answer.as_json(len(ids), session.load_s), ensure_ascii=False))
    else:
        sys.stdout.write("\n")
        if answer.finish_reason is FinishReason.LENGTH and args.max_tokens is None:
            note("the answer ended because the context is full; --context sets its length")
    return EXIT_INTERRUPTED if interrupts.asked else 0
