"""`ddpdoctor`, and `python -m ddpdoctor`."""

import sys


def main() -> int:
    """Run a command; returns the exit status. Ctrl-C counts from the first import on."""
    try:
        from .cli import INTERRUPTED
        from .cli import main as command
    except KeyboardInterrupt:
        return 130
    try:
        return command()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
