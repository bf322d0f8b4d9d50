"""`python scripts/train.py --config FILE`, as SFT-Play has it: `erg train`."""

import sys

try:
    from ergmeter.cli.main import main
    from ergmeter.cli.measure.train import command
except ModuleNotFoundError:
    sys.exit(
        "ergmeter is not installed in this Python; in a clone: .venv/bin/python, or ./dev train"
    )

if __name__ == "__main__":
    main(command=command, program="train.py")
