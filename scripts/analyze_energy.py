"""Compare the backends in an energy ledger: `python scripts/analyze_energy.py [LEDGER] [OPTIONS]`.

The name that SFT-Play's guide promises; it is `erg compare`, grouped by backend.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from ergmeter.cli.main import main
except ModuleNotFoundError:
    sys.exit(
        "ergmeter is not installed in this Python; in a clone: .venv/bin/python, or make compare"
    )

LEDGER = "outputs/energy_results.csv"

if __name__ == "__main__":
    given = sys.argv[1:]
    names_source = any(Path(one).exists() or one.endswith(".csv") for one in given)
    main(["compare", *([] if names_source else [LEDGER]), *given])
