"""Private phrases are in no text that a user or a reader of the code sees."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [p for e in ("py", "js", "html", "md", "toml") for p in (ROOT / "src").rglob(f"*.{e}")]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
# Each with the words to use instead.
BANNED = {
    "tensor pipes": "tensor cores",
    "pipes at work": "tensor cores active",
    "multiprocessors at work": "SMs active",
    "multiprocessors without work": "idle SMs",
    "held down": "throttled; power-limited",
    "# To know": "Notes",
    "told apart": "unattributed; separated",
    "tells them apart": "separates them",
    "at work, but not multiplying": "non-matmul kernels",
    "nobody knows": "unknown",
    "nobody told": "not given",
    "nobody said": "not given",
    "held against": "compared with",
    "chance alone": "p-value",
    "is going": "is running",
    "what was learned, less": "validation loss minus",
    "a name that there is not": "unknown names",
    "one too many": "too many viewers: retry in a moment",
    "who comes": "visitors",
    "was told itself": "`erg record` options override",
    "is the question, and is never": "differences in `--group-by` columns",
    "of other tokens on": "tokens per sample differ",
    "each rung says less": "each row is closer to useful work",
    "look for what stops": "find what delays",
    "pages are a GPU's": "needs a GPU",
    "thin upright": "thin vertical",
    "found out by themselves": "found automatically",
    "far it is, nobody": "progress unknown: no total step count",
}


@pytest.mark.parametrize("phrase", BANNED)
def test_a_phrase_is_nowhere(phrase: str) -> None:
    pattern = re.compile(r"\s+".join(map(re.escape, phrase.split())), re.IGNORECASE)
    texts = {path: re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in (*SOURCES, *PAGES)}
    found = [str(path.relative_to(ROOT)) for path, text in texts.items() if pattern.search(text)]
    assert not found, f"write: {BANNED[phrase]}"
