"""Compare the backends in an energy ledger: `python scripts/analyze_energy.py [LEDGER] [OPTIONS]`.

The name that SFT-Play's guide promises; it is `erg compare`, grouped by backend. A ledger of a
single backend is shown, with exit code 0, where `erg compare` has nothing to compare and exits 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from ergmeter.cli.main import main
    from ergmeter.compare.sources import read_entries
    from ergmeter.errors import ErgmeterError
except ModuleNotFoundError:
    sys.exit(
        "ergmeter is not installed in this Python; in a clone: .venv/bin/python, or make compare"
    )

LEDGER = "outputs/energy_results.csv"


def is_of_one_backend(paths: list[Path]) -> bool:
    """True if all rows were read, and are of one backend."""
    try:
        sources = read_entries(paths)
    except ErgmeterError:
        return False
    backends = {entry.facts.get("backend") for entry in sources.entries}
    return len(backends) == 1 and not sources.left_out


if __name__ == "__main__":
    words = sys.argv[1:]
    sources = [word for word in words if Path(word).exists() or word.endswith(".csv")]
    grouped = [] if "--group-by" in " ".join(words) else ["--group-by", "backend"]
    try:
        main(["compare", *([] if sources else [LEDGER]), *words, *grouped])
    except SystemExit as ended:
        code = ended.code
    if code == 1 and grouped and is_of_one_backend([Path(path) for path in sources or [LEDGER]]):
        code = 0
    sys.exit(code)
