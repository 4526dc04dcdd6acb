"""``python -m headrace``: the same as the ``headrace`` command."""

from headrace.cli.entry import main

if __name__ == "__main__":
    raise SystemExit(main())
