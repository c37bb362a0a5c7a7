"""`python -m ridgeline`: the command line without the console script."""

from ridgeline.cli import main

main()
