"""`python -m p2ptrain` is the command `p2ptrain`."""

from p2ptrain.cli.main import main

main()
