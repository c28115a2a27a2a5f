"""`python -m weft` is the `weft` command."""

from weft.cli.main import main

main()
