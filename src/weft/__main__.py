"""Entry point of `python -m weft`, which is the `weft` command."""

from weft.cli.app import main

if __name__ == "__main__":
    main()
