"""`python -m rocstar` is the `rocstar` command."""

from rocstar.cli import main

if __name__ == "__main__":
    main()
