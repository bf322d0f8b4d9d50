"""Is one backend better than another? The shipped GPU configurations, in turns, on a real GPU.

One run of each would say little. `erg train` runs A B C, C B A, ... with a seed a round; each
backend gets so many steps that its steady window lasts half a minute or more, whatever its speed.
Steps then differ between backends, so the losses at the end are not compared, and `erg compare`
says so.

    python bench/backends.py --out FOLDER --repeats 3 --steps 60 60 120
    erg compare FOLDER/energy_results.csv --group-by backend
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import yaml

CONFIGS = Path(__file__).parents[1] / "configs"


def written(out: Path, backend: str, steps: int, *, seed: int, warmup_s: float) -> Path:
    """The shipped configuration of a backend, with this many steps."""
    path = out / f"{backend}.yaml"
    changes = {
        "include": str((CONFIGS / f"run_{backend}.yaml").resolve()),
        "seed": seed,
        "model": {"local_dir": str(out / "models")},
        # The same of all, as when the worked example of docs/compare.md was measured.
        "tuning": {"lora": {"dropout": 0.0}},
        "train": {
            "bf16": True,
            "fp16": False,
            "max_steps": steps,
            "output_dir": str(out / "outputs" / backend),
        },
        "metrics": {"warmup_s": warmup_s, "results_csv": str(out / "energy_results.csv")},
    }
    path.write_text(yaml.safe_dump(changes), encoding="utf-8")
    return path


def main() -> int:
    """Run the series."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backends", nargs="+", default=["torch", "bnb", "unsloth"])
    parser.add_argument("--steps", nargs="+", type=int, default=[60, 60, 120])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--warmup-s", type=float, default=8.0)
    parser.add_argument("--cool-down", type=float, default=3.0)
    given = parser.parse_args()
    if len(given.backends) != len(given.steps):
        parser.error(f"{len(given.backends)} backends and {len(given.steps)} numbers of steps")
    given.out.mkdir(parents=True, exist_ok=True)
    paths = [
        written(given.out, backend, steps, seed=given.seed, warmup_s=given.warmup_s)
        for backend, steps in zip(given.backends, given.steps, strict=True)
    ]
    words = [sys.executable, "-m", "ergmeter", "train", "--config", str(paths[0])]
    for path in paths[1:]:
        words += ["--interleave", str(path)]
    words += ["--repeats", str(given.repeats), "--cool-down", str(given.cool_down)]
    begun_s = time.monotonic()
    code = subprocess.run([*words, "--out", str(given.out / f"runs-{given.seed}")]).returncode
    print(f"{time.monotonic() - begun_s:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
