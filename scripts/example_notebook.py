"""`python scripts/example_notebook.py`: writes examples/notebook.ipynb, with its outputs.

The cells are below. nbconvert runs them in an empty folder; times, versions and paths of this
machine are left out of what is stored. `--cells FILE` writes the notebook without running it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "notebook.ipynb"

TEXT = """\
# ergmeter in a notebook

Put `%%erg` on the first line of a cell that trains. After the cell come its card and a chart."""

MODEL = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 512), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(steps):
    for _ in range(steps):
        ids = torch.randint(0, 256, (8, 129))
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()"""

TRAIN = """\
%%erg --name tiny --warmup-steps 5
train(steps=300)"""

READING = """\
from ergmeter import summarize

summarize(erg_run).readings["throughput.tokens_per_s"]"""

STEPS = """\
steps = erg_run.to_pandas()
steps["step_s"] = (steps.end_ns - steps.start_ns) / 1e9
steps[["index", "tokens_computed", "samples", "step_s"]].tail(3)"""

CELLS = (
    ("markdown", TEXT),
    ("code", "%load_ext ergmeter"),
    ("code", MODEL),
    ("code", TRAIN),
    ("markdown", "The run is in `erg_run`. A metric has its interval and its basis:"),
    ("code", READING),
    ("markdown", "Its steps as a table; `to_polars` and `to_arrow` give the same one:"),
    ("code", STEPS),
)


def notebook(cells: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """A notebook of these cells, each a kind and a source, without outputs."""
    made = []
    for number, (kind, source) in enumerate(cells):
        cell = {"id": f"cell-{number}", "cell_type": kind, "metadata": {}, "source": source}
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def executed(
    path: Path, *options: str, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """The notebook of a file as nbconvert ran it, in its folder."""
    words = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", *options]
    words += ["--ExecutePreprocessor.record_timing=False", "--output", "executed", str(path)]
    done = subprocess.run(
        words, cwd=path.parent, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    document: dict[str, Any] = json.loads(path.with_name("executed.ipynb").read_text("utf-8"))
    return document


def main() -> None:
    """Write the notebook; run it unless `--cells` is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=Path, metavar="FILE", help="write it here, without outputs")
    target: Path | None = parser.parse_args().cells
    document = notebook(CELLS)
    if target is None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "notebook.ipynb")
            path.write_text(json.dumps(document), encoding="utf-8")
            document["cells"] = executed(path)["cells"]
    text = json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True)
    (target or EXAMPLE).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
