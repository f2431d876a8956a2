"""`ddpdoctor`, and `python -m ddpdoctor`."""

import sys


def main() -> int:
    """Run a command; returns the exit status. Ctrl-C counts from the first import on."""
    try:
        from .cli import main as command
    except KeyboardInterrupt:
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
