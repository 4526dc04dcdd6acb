"""Where the ``headrace`` command begins and ends: ctrl-C leaves with 130 and nothing printed, at any time.

A command handles ctrl-C itself, while it runs. Before that its modules are imported (a twentieth of a
second, in which an interrupt was a traceback), and afterwards Python puts itself away. Nothing is open then
that would need an orderly end. Imports nothing that is not there already: what Python does before its
first line here, a fiftieth of a second, is the only time in which an interrupt can still print something.
"""

import os

# What the module ``signal`` wraps; that one imports enumerations, for milliseconds.
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]

from headrace.cli.exit_codes import EXIT_INTERRUPTED


def leave_at_once(signum: int, frame: object) -> None:
    """A handler of ctrl-C that ends the process."""
    os._exit(EXIT_INTERRUPTED)


def main() -> int:
    """Run the command that the arguments name; the exit code."""
    # Ignored from the start (`nohup headrace ... &`): that stays so.
    own = getsignal(SIGINT) is default_int_handler
    if own:
        signal(SIGINT, leave_at_once)
    from headrace.cli.main import main as run

    asked: list[int] = []

    def interrupt(signum: int, frame: object) -> None:
        asked.append(signum)
        raise KeyboardInterrupt

    def listen() -> None:
        if own:
            signal(SIGINT, interrupt)

    try:
        # An import can turn the interrupt into an error of its own, which would be told as a fault.
        return run(before_command=listen, interrupted=lambda: bool(asked))
    except KeyboardInterrupt:  # while an error was being told
        return EXIT_INTERRUPTED
    finally:
        if own:
            signal(SIGINT, leave_at_once)
