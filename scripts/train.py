"""`python scripts/train.py --config FILE`, as SFT-Play has it: `erg train`."""

from ergmeter.cli.main import main
from ergmeter.cli.train import command

if __name__ == "__main__":
    main(command=command, program="train.py")
