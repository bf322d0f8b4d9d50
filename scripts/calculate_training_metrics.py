"""`python scripts/calculate_training_metrics.py --config YAML ...`, as nki-llama: `erg analyze`."""

import sys

try:
    from ergmeter.cli.calculate.analyze import main
except ModuleNotFoundError:
    sys.exit("ergmeter is not installed in this Python; in a clone: .venv/bin/python")

if __name__ == "__main__":
    main()
