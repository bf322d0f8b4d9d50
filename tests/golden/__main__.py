"""`python -m tests.golden --check` compares with the stored outputs; `--update` stores new ones."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
import time
from pathlib import Path

from tests.golden import expected
from tests.golden.corpus import cases
from tests.golden.running import Runner


def main() -> int:
    """Run the cases. Exit code 1 if an output differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="compare with the stored outputs")
    action.add_argument("--update", action="store_true", help="store the outputs of now")
    action.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--only", default="*", metavar="GLOB", help="just the cases of this name")
    parser.add_argument("--slowest", type=int, default=0, metavar="N", help="name the slowest")
    asked = parser.parse_args()
    chosen = [case for case in cases() if fnmatch.fnmatch(case.name, asked.only)]
    if asked.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if asked.update and asked.only == "*":
        for path in expected.FOLDER.glob("*.txt"):
            path.unlink()
    expected.FOLDER.mkdir(exist_ok=True)
    differing, took_s = 0, {}
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        runner = Runner(Path(folder) / "work")
        for case in chosen:
            began_s = time.perf_counter()
            found = runner.run(case)
            took_s[case.name] = time.perf_counter() - began_s
            if asked.update:
                expected.path_of(case.name).write_bytes(found.encode())
            elif diff := expected.difference(case.name, found):
                differing += 1
                sys.stdout.write(diff)
    for name in sorted(took_s, key=lambda one: -took_s[one])[: asked.slowest]:
        print(f"{took_s[name]:6.2f} s  {name}")
    print(f"{len(chosen)} cases in {sum(took_s.values()):.0f} s, {differing} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
