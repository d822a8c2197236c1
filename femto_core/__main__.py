"""`python -m femto_core` is `femto`."""

from femto_core.cli import main

main()
