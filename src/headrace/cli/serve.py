"""``headrace serve``: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import os
import re

from headrace.cli.flags import (
    Commands,
    add_command,
    add_engine_flags,
    engine_config,
    real_number,
    whole_number,
)
from headrace.cli.reporting import configure_logging, note
from headrace.core.errors import ConfigError
from headrace.server.settings import DEFAULT_STUCK_S

DEFAULT_PORT = 8000
LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEY_VARIABLE = "HEADRACE_API_KEY"


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "serve", "answer over HTTP, as the OpenAI API does", run)
    add_engine_flags(parser)
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add(
        "--port",
        type=whole_number("--port", 0, 65535),
        default=DEFAULT_PORT,
        help=f"port to listen on; 0 takes a free one (default: {DEFAULT_PORT})",
    )
    add(
        "--api-key",
        metavar="KEY",
        help=f"refuse requests without this key; the variable {KEY_VARIABLE} does the same, unseen "
        "by other users of the machine",
    )
    add(
        "--model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="name that clients use for the model; can be repeated (default: the model's own)",
    )
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="browser origin that may call the server, * for any; can be repeated",
    )
    add(
        "--stuck-after",
        type=real_number("--stuck-after"),
        default=DEFAULT_STUCK_S,
        metavar="SECONDS",
        help="refuse requests, and say so in /health, while the engine has not ended a step for so long; 0: "
        f"never (default: {DEFAULT_STUCK_S:g})",
    )
    add(
        "--max-batch-tokens",
        type=whole_number("--max-batch-tokens", 1),
        metavar="N",
        help="tokens computed in one step at most (default: 512 on a CPU, 2048 on a GPU, up to 18432 where "
        "streaming experts for each chunk of a prompt makes it worth it)",
    )
    add(
        "--max-num-seqs",
        type=whole_number("--max-num-seqs", 1),
        metavar="N",
        help="sequences computed at once at most",
    )
    add(
        "--kv-tokens",
        type=whole_number("--kv-tokens", 1),
        metavar="N",
        help="tokens that all sequences may cache together",
    )


def _check_names(args: argparse.Namespace) -> None:
    """Refuse names that no request could ever carry.

    Raises:
        ConfigError: an empty model name, or an origin that is none.
    """
    for name in args.model_name:
        if not name.strip():
            raise ConfigError(
                "--model-name is empty", hint="give a name or leave it out", param="--model-name"
            )
    for origin in args.cors_origin:
        if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin) is None:
            raise ConfigError(
                f"--cors-origin is {origin!r}; it must be * or SCHEME://HOST[:PORT], without a path",
                hint="as a browser sends it, for example https://chat.example.com",
                param="--cors-origin",
            )


def _api_key(given: str | None) -> str | None:
    """The flag's key, or the variable's. A blank one is refused: a secret that was not filled in would
    leave the server open to everybody."""
    name = "--api-key" if given is not None else KEY_VARIABLE
    key = given if given is not None else os.environ.get(KEY_VARIABLE)
    if key is not None and not key.strip():
        raise ConfigError(f"{name} is empty", hint="give a key or leave it out", param=name)
    return key


def run(args: argparse.Namespace) -> int:
    configure_logging(args.verbose)
    api_key = _api_key(args.api_key)
    _check_names(args)
    if args.host not in LOOPBACK and not api_key:
        note(f"warning: {args.host} can be reached from other machines and no --api-key is set")
    config = engine_config(
        args,
        max_batch_tokens=args.max_batch_tokens,
        max_num_seqs=args.max_num_seqs,
        kv_tokens=args.kv_tokens,
    )
    from headrace.server.run import serve
    from headrace.server.settings import ServerSettings

    settings = ServerSettings(
        model_ids=tuple(args.model_name),
        api_key=api_key,
        cors_origins=tuple(args.cors_origin),
        stuck_s=args.stuck_after,
    )
    return serve(config, settings, host=args.host, port=args.port)
