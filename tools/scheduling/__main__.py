"""Entry point of ``python -m tools.scheduling``."""

from tools.scheduling.command import main

main()
