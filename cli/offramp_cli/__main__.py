"""``python -m offramp_cli``."""

from offramp_cli.main import main

main()
