"""Run the command line as `python -m ridgeline`, without the console script."""

from ridgeline.cli import main

main()
