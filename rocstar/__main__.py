"""`python -m rocstar` is the `rocstar` command, and so is what an installation puts on the PATH."""

import sys


def main() -> None:
    """The command; Ctrl-C is answered from here on."""
    try:
        from rocstar.cli.main import main as carry_out
    except KeyboardInterrupt:
        print("rocstar: stopped before anything began", file=sys.stderr)
        sys.exit(130)
    carry_out()


if __name__ == "__main__":
    main()
