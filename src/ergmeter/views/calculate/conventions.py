"""The conventions in words, and side by side for one model."""

from __future__ import annotations

from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any

from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.conventions import CONVENTIONS, LETTERS
from ergmeter.flops.source import model_graph
from ergmeter.flops.work import step_work

if TYPE_CHECKING:
    from ergmeter.flops.conventions import Convention

# Llama 3 8B (arXiv 2407.21783, table 3): the model that most published results are of.
_EXAMPLE = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
_LENGTHS = (2048, 8192, 131072)


def entry(one: Convention, *, width: int) -> str:
    """One convention for a terminal of so many columns."""
    letters = ", ".join(f"{letter} {word}" for letter, word in one.letters.items())
    said = [
        one.definition,
        *([f"letters: {letters}; per token"] if letters else []),
        *_limits(one),
        f"source: {one.source}",
    ]
    wrap = TextWrapper(width, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
    return "\n".join([f"{one.name}: {one.formula}", *(wrap.fill(line) for line in said)])


def _limits(one: Convention) -> list[str]:
    """What it is not for, in words."""
    if one.weights is None:
        return []
    said = ["training with LoRA"] if one.is_for_lora else ["whole sequences, every weight trained"]
    said += ["a causal mask"] if one.halves else []
    said += [one.only_for] if one.only_for else []
    return [f"for: {', '.join(said)}"]


def document(one: Convention) -> dict[str, Any]:
    """One convention as JSON."""
    return {
        "name": one.name,
        "formula_per_token": one.formula,
        "letters": one.letters,
        "definition": one.definition,
        "limits": _limits(one),
        "source": one.source,
    }


def _more(one: Convention) -> str:
    return f" Only for {one.only_for}." if one.only_for else ""


def page() -> str:
    """The page docs/conventions.md."""
    said = [
        "# Conventions: how others count a training step",
        "",
        "<!-- Made by `erg conventions --markdown`; do not edit. -->",
        "",
        f"Per token. {', '.join(f'{letter}: {word}' for letter, word in LETTERS.items())}.",
        "[flops.md](flops.md) derives `exact`; all others are other people's formulas as they are,",
        "for comparing with their figures, and for whole sequences. But for those of LoRA they are",
        "for training every weight. `--convention NAME` chooses one; every report shows the spread",
        "over the rest that are defined for the model, and says which are not and why.",
        "",
        "| name | per token | what it counts | source |",
        "| --- | --- | --- | --- |",
    ]
    said += [
        f"| `{one.name}` | {one.formula} | {one.definition}{_more(one)} | {one.source} |"
        for one in CONVENTIONS.values()
    ]
    said += [
        "",
        "## Side by side",
        "",
        "Llama 3 8B, GFLOP per token of a full training step, and against `exact`:",
        "",
        "| convention | " + " | ".join(f"T = {length}" for length in _LENGTHS) + " |",
        "| --- | " + " | ".join("---:" for _ in _LENGTHS) + " |",
    ]
    graph = model_graph(ModelConfig(dict(_EXAMPLE), where="the example"))
    works = [step_work(graph, Batch.of(1, length)) for length in _LENGTHS]
    for name in works[0].flops:
        cells = []
        for work, length in zip(works, _LENGTHS, strict=True):
            flops, exact = work.flops[name].model_per_step, work.chosen.model_per_step
            off = round(100 * (flops / exact - 1), 1) or 0.0  # no -0.0
            cells.append(f"{flops / length / 1e9:.2f} ({off:+.1f} %)")
        said.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(said) + "\n"
