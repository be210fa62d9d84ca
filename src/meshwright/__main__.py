"""``python -m meshwright``: the command line, for starters that take a module."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="meshwright")
