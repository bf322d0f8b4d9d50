"""What does a step cost with our callback and every sink on, next to what others count with?

The trap: a callback's own time is not its cost. A tracker that opens a database beside the training
takes the interpreter from it for a while, so whole trainings are compared: the same small model and
batches, in short turns that begin with another way each time. Each way has a process of its own,
which waits between its turns: what one leaves running must not slow the next. And the speed of a
shared machine drifts by a tenth within a minute: so each turn is held against the bare one of its
round, and many rounds make the median, with the quartiles beside it.

Lightning's ThroughputMonitor and Hugging Face's own counting give tokens/s; CodeCarbon's callback
gives energy. None gives both, so none is the same work as ours.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import tables

BATCH, LENGTH, VOCABULARY = 4, 128, 512
SINKS_EVERY_S = 1.0
FIRST = 20  # steps of each training that are left out
HEADER = (
    "training with",
    "step ms",
    "by the clock, to bare",
    "quartiles",
    "training thread's CPU, to bare",
    "quartiles",
    "all threads' CPU, to bare",
)

Times = tuple[float, float, float]  # of the training thread's CPU, of all threads', of the clock
Training = Callable[[int, Path], list[Times]]


def now() -> Times:
    """The three clocks."""
    return time.thread_time(), time.process_time(), time.perf_counter()


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens with some padding."""

    def __init__(self, steps: int) -> None:
        self._rows = steps * BATCH

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < LENGTH - index % 32).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def model() -> torch.nn.Module:
    """A Llama of a few milliseconds a step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    made: torch.nn.Module = LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )
    return made


def every_sink(folder: Path) -> list[Any]:
    """All nine, each with its real library, none with a network."""
    return [
        ("console", {"stream": os.devnull}),
        "csv",
        "jsonl",
        "tensorboard",
        ("wandb", {"project": "bench"}),
        ("mlflow", {"tracking_uri": f"sqlite:///{folder.parent / 'mlflow.db'}"}),
        ("prometheus", {"port": 0}),
        ("otel", {"endpoint": "http://127.0.0.1:9/v1/metrics"}),
        ("trackio", {"project": "bench"}),
    ]


def trainer(steps: int, folder: Path, *, way: str) -> list[Times]:
    """Train with transformers' Trainer; the times at which its steps ended."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ergmeter.integrations.huggingface import ErgmeterCallback

    ends: list[Times] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(now())

    callbacks: list[Any] = [Clock()]
    more: dict[str, Any] = {}
    if way == "ours":
        callbacks.append(ErgmeterCallback(folder / "run"))
    elif way == "sinks":
        sinks = every_sink(folder)
        callbacks.append(ErgmeterCallback(folder / "run", sinks=sinks, sinks_every_s=SINKS_EVERY_S))
    elif way == "hf":
        more["include_num_input_tokens_seen"] = "non_padding"
    elif way == "codecarbon":
        more["report_to"] = "codecarbon"
    arguments = TrainingArguments(
        **{"report_to": "none", **more},
        output_dir=str(folder / "out"), per_device_train_batch_size=BATCH, num_train_epochs=1,
        logging_steps=10, save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    Trainer(model=model(), args=arguments, train_dataset=Tokens(steps), callbacks=callbacks).train()
    return ends


def lightning(steps: int, folder: Path, *, way: str) -> list[Times]:
    """Train with Lightning; the times at which its steps ended."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback, ThroughputMonitor
    from lightning.pytorch.loggers import CSVLogger

    from ergmeter.integrations.lightning import ErgmeterCallback

    ends: list[Times] = []

    class Clock(Callback):
        def on_train_batch_end(self, *_: object, **__: object) -> None:
            ends.append(now())

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()

        def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
            return self.model(**batch).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    callbacks: list[Any] = [Clock()]
    if way == "ours":
        callbacks.append(ErgmeterCallback(folder / "run"))
    elif way == "monitor":
        callbacks.append(
            ThroughputMonitor(
                batch_size_fn=lambda batch: batch["input_ids"].size(0),
                length_fn=lambda batch: batch["input_ids"].numel(),
            )
        )
    loader = torch.utils.data.DataLoader(Tokens(steps), batch_size=BATCH)
    pl.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=callbacks, logger=CSVLogger(str(folder)),
        log_every_n_steps=10, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, default_root_dir=str(folder),
    ).fit(Module(), loader)  # fmt: skip
    return ends


WAYS: dict[str, dict[str, Training]] = {
    "Hugging Face Trainer": {
        "nothing (bare)": partial(trainer, way="bare"),
        "ergmeter's callback": partial(trainer, way="ours"),
        "ergmeter's callback and all nine sinks, every second": partial(trainer, way="sinks"),
        "its own token counting (non_padding)": partial(trainer, way="hf"),
        "CodeCarbon's callback": partial(trainer, way="codecarbon"),
    },
    "Lightning Trainer": {
        "nothing (bare)": partial(lightning, way="bare"),
        "ergmeter's callback": partial(lightning, way="ours"),
        "its ThroughputMonitor": partial(lightning, way="monitor"),
    },
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What trainers print is no part of the table."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), Path(os.devnull).open("w") as nowhere:
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    logging.disable(logging.NOTSET)


def main() -> None:
    """Run the trainings in turns and print how they compare."""
    options = tables.parser(__doc__)
    options.add_argument("--steps", type=int, default=120, help="steps of each training")
    given = options.parse_args()
    rounds = given.rounds or 20
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", CODECARBON_LOG_LEVEL="critical")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(TRACKIO_DIR=scratch, WANDB_DIR=scratch)
        os.chdir(scratch)
        for framework, ways in WAYS.items():
            found = measured(ways, given.steps, rounds, Path(scratch))
            show(framework, found, given.steps, rounds)
            tables.save(given.json, {framework: found})


def measured(
    ways: dict[str, Training], steps: int, rounds: int, scratch: Path
) -> dict[str, list[list[Times]]]:
    """Step times of every round of every way; one round beforehand is for caches and databases."""
    found: dict[str, list[list[Times]]] = {name: [] for name in ways}
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        pools = {name: stack.enter_context(context.Pool(1)) for name in ways}
        for turn in range(-1, rounds):
            names = [*ways]
            names = names[turn % len(names) :] + names[: turn % len(names)]
            for name in names:
                folder = scratch / f"{turn}-{[*ways].index(name)}-{id(ways)}"
                folder.mkdir()
                ends = pools[name].apply(alone, (ways[name], steps, folder))
                if turn >= 0:
                    found[name].append(ends)
    return found


def alone(train: Training, steps: int, folder: Path) -> list[Times]:
    """One training, in a process that does nothing else."""
    torch.set_num_threads(1)
    with quiet():
        return train(steps, folder)


def show(framework: str, found: dict[str, list[list[Times]]], steps: int, rounds: int) -> None:
    """The table of one framework."""
    bare = [summed(ends) for ends in found["nothing (bare)"]]
    rows = []
    for name, turns in found.items():
        each = [summed(ends) for ends in turns]
        own, every, clock = (
            [one[which] / other[which] for one, other in zip(each, bare, strict=True)]
            for which in range(3)
        )
        step_ms = statistics.median(one[2] for one in each) * 1e3
        cells = (middle(clock), quartiles(clock), middle(own), quartiles(own), middle(every))
        rows.append((name, f"{step_ms:.2f}", *cells))
    note = f"{tables.machine()}; {rounds} rounds of {steps} steps of {BATCH} x {LENGTH} tokens"
    tables.show(f"A training step under {framework}", HEADER, rows, note=note)


def middle(ratios: list[float]) -> str:
    """The median."""
    return f"{statistics.median(ratios):.3f}"


def quartiles(ratios: list[float]) -> str:
    """Between which half of them lie."""
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{low:.2f} to {high:.2f}"


def summed(ends: list[Times]) -> Times:
    """Of a step, without the first ones: the thread's CPU, all threads' CPU, the clock."""
    late = ends[FIRST:]
    steps = [
        tuple(after - before for before, after in zip(earlier, later, strict=True))
        for earlier, later in pairwise(late)
    ]
    own, clock = (statistics.median(step[which] for step in steps) for which in (0, 2))
    return own, (late[-1][1] - late[0][1]) / len(steps), clock


if __name__ == "__main__":
    main()
