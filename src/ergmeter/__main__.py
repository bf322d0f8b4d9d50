"""`python -m ergmeter` is `erg`."""

from ergmeter.cli.main import main

main()
