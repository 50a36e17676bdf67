"""`python -m translator` is the command line."""

from translator.cli import main

main()
