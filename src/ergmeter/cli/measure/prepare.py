"""`erg prepare`: what a fine-tuning would be given, before anything is trained."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.measure.torch_workload import needing
from ergmeter.cli.options import flag, path_option, print_json

if TYPE_CHECKING:
    from ergmeter.workloads.sft.config_file import SftConfig
    from ergmeter.workloads.sft.prepared_data import EpochTokens, Prepared


@click.command()
@path_option("--config", "config_path", required=True, help="The YAML file of the training.")
@click.option(
    "--sample",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write some examples as they read. [default: sample.txt in train.output_dir]",
)
@flag("--json", "as_json", help="As JSON.")
def command(config_path: Path, sample: Path | None, as_json: bool) -> int:
    """Tokenise the data of a training and show what is in it; train nothing.

    Counts rows and tokens: those of text, those computed (padding included), and those that count
    in the loss. Writes the first examples as the model reads them, with what counts in the loss
    between marks.

    \b
    erg prepare --config configs/cpu/run_torch.yaml
    """
    from ergmeter.workloads.sft.config_file import load

    config = load(config_path)
    with needing("torch", "transformers", "tokenizers", "jinja2", what="this", extra="train"):
        data, parts = _prepared(config)
    where = sample or config.train.output_dir / "sample.txt"
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(_rendered(data), encoding="utf-8")
    if as_json:
        print_json(_document(config, data, parts, where))
    else:
        for line in _lines(config, data, parts):
            click.echo(line)
        click.echo(f"The first examples, as the model reads them: {where}")
    return 0


def _prepared(config: SftConfig) -> tuple[Prepared, dict[str, EpochTokens]]:
    from ergmeter.workloads.sft.prepared_data import epoch_tokens, prepare_data

    data = prepare_data(config, _tokenizer(config))
    size = config.train.batch_size
    parts = {"training": epoch_tokens(data.train, data.collate, batch_size=size)}
    if data.evaluation is not None:
        parts["evaluation"] = epoch_tokens(data.evaluation, data.collate, batch_size=size)
    return data, parts


def _tokenizer(config: SftConfig) -> Any:  # noqa: ANN401  of transformers
    """Return the model's tokenizer, without making the weights of a built-in model."""
    if config.model.is_builtin:
        from ergmeter.workloads.sft.tiny_model import tokenizer

        return tokenizer(config.model.name)
    from ergmeter.workloads.sft import trainers

    return trainers.load_part(config, config.model.local_dir or config.model.name, "AutoTokenizer")


def _rendered(data: Prepared) -> str:
    """Return the samples, with text that counts in the loss between marks."""
    texts = (
        "".join(f"⟦{text}⟧" if bears_loss else text for text, bears_loss in sample.parts)
        for sample in data.samples
    )
    return "text between ⟦ and ⟧ counts in the loss\n" + "".join(
        f"\n--- example {number}\n{text}\n" for number, text in enumerate(texts, 1)
    )


def _document(
    config: SftConfig, data: Prepared, parts: dict[str, EpochTokens], sample: Path
) -> dict[str, Any]:
    return {
        "config": str(config.path),
        "model": config.model.name,
        "task_mode": config.task_mode,
        "seq_len": data.seq_len,
        "packing": config.data.packing,
        "batch_size": config.train.batch_size,
        "documents": data.documents,
        **{name: asdict(part) for name, part in parts.items()},
        "notes": list(data.notes),
        "sample": str(sample),
    }


def _lines(config: SftConfig, data: Prepared, parts: dict[str, EpochTokens]) -> list[str]:
    packed = ", packed" if config.data.packing else ""
    lines = [
        f"{config.path}: {config.task_mode}{packed} for {config.model.name},"
        f" up to {data.seq_len} tokens a row, {config.train.batch_size} rows a batch",
        f"{data.documents:,} documents were read to train on",
    ]
    for name, part in parts.items():
        lines += [
            f"{name}: {part.rows:,} rows of {part.shortest} to {part.longest} tokens"
            f" (median {part.median:g})",
            f"  {part.real:>12,} real tokens",
            f"  {part.computed:>12,} computed, padding included"
            f" ({100 * part.real / part.computed:.1f} % real)",
            f"  {part.loss:>12,} count in the loss",
        ]
    return [*lines, *data.notes]
