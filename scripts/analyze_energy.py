"""Compare the backends in an energy ledger: `python scripts/analyze_energy.py [LEDGER] [OPTIONS]`.

The name that SFT-Play's guide promises; it is `erg compare`, grouped by backend.
"""

from __future__ import annotations

import sys

from ergmeter.cli.main import main

if __name__ == "__main__":
    given = sys.argv[1:]
    names_source = any(not one.startswith("-") for one in given[:1])
    main(["compare", *([] if names_source else ["outputs/energy_results.csv"]), *given])
