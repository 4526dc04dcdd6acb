"""Exit codes that are not an error's own (``core.errors`` has those). Imports nothing: see ``cli.entry``."""

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE
