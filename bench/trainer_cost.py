"""What does a step cost with our callback and every sink on, next to what others count with?

A callback's own time is not its cost. A tracker that opens a database beside the training
takes the interpreter from it for a while, so whole trainings are compared: the same small model and
batches. And the speed of a shared machine drifts by a tenth within seconds. So all trainings are
made at the same time, each in a process of its own, and take turns at every step: one makes its
step while the others wait. Steps are held against the bare ones next to them, summed over blocks,
so that what comes once a second is in it. A second bare training is what the bench makes of
nothing at all.

Lightning's ThroughputMonitor and Hugging Face's own counting give tokens/s; CodeCarbon's callback
gives energy. None gives both, so none is the same work as ours.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import tables

BATCH, LENGTH, VOCABULARY = 4, 128, 512
SINKS_EVERY_S = 1.0
FIRST = 60  # steps of each training that are left out: sinks load their libraries
BLOCK = 20  # steps, whose sums are compared
HEADER = (
    "training with",
    "step ms",
    "by the clock, to bare",
    "95 % interval",
    "training thread's CPU, to bare",
    "95 % interval",
    "all threads' CPU, to bare",
)
BARE = "nothing (bare)"

Times = tuple[float, float, float]  # of the training thread's CPU, of all threads', of the clock
Turn = Callable[[], None]
Training = Callable[[int, Path, Turn], None]


class Turns:
    """One training's part: told when to go on, it tells when its step is over and what it took."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._before: Times | None = None

    def __call__(self) -> None:
        """A step is over, with all that was done between steps; wait for the next turn."""
        after = (time.thread_time(), time.process_time(), time.perf_counter())
        self._line.send(None if self._before is None else _less(after, self._before))
        self._line.recv()
        thread, clock = time.thread_time(), time.perf_counter()
        # What other threads do while this one waits is part of the whole process's.
        self._before = (thread, after[1], clock)


def _less(after: Times, before: Times) -> Times:
    own, every, clock = (later - earlier for later, earlier in zip(after, before, strict=True))
    return own, every, clock


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
    made: torch.nn.Module = LlamaForCausalLM(
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


def trainer(steps: int, folder: Path, turn: Turn, *, way: str) -> None:
    """Train with transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ergmeter.integrations.huggingface import ErgmeterCallback

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            turn()

    callbacks: list[Any] = []
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
    made = Trainer(model=model(), args=arguments, train_dataset=Tokens(steps), callbacks=callbacks)
    made.add_callback(Clock())  # the last of all
    made.train()


def lightning(steps: int, folder: Path, turn: Turn, *, way: str) -> None:
    """Train with Lightning."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback, ThroughputMonitor
    from lightning.pytorch.loggers import CSVLogger

    from ergmeter.integrations.lightning import ErgmeterCallback

    class Clock(Callback):
        def on_train_batch_end(self, *_: object, **__: object) -> None:
            turn()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()

        def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
            return self.model(**batch).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    callbacks: list[Any] = []
    if way == "ours":
        callbacks.append(ErgmeterCallback(folder / "run"))
    elif way == "monitor":
        callbacks.append(
            ThroughputMonitor(
                batch_size_fn=lambda batch: batch["input_ids"].size(0),
                length_fn=lambda batch: batch["input_ids"].numel(),
            )
        )
    callbacks.append(Clock())  # the last of all
    loader = torch.utils.data.DataLoader(Tokens(steps), batch_size=BATCH)
    pl.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=callbacks, logger=CSVLogger(str(folder)),
        log_every_n_steps=10, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, default_root_dir=str(folder),
    ).fit(Module(), loader)  # fmt: skip


WAYS: dict[str, dict[str, Training]] = {
    "Hugging Face Trainer": {
        BARE: partial(trainer, way="bare"),
        "nothing, a second time": partial(trainer, way="bare"),
        "ergmeter's callback": partial(trainer, way="ours"),
        "ergmeter's callback and all nine sinks, every second": partial(trainer, way="sinks"),
        "its own token counting (non_padding)": partial(trainer, way="hf"),
        "CodeCarbon's callback": partial(trainer, way="codecarbon"),
    },
    "Lightning Trainer": {
        BARE: partial(lightning, way="bare"),
        "nothing, a second time": partial(lightning, way="bare"),
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
    options.add_argument("--steps", type=int, default=360, help="steps of each training")
    given = options.parse_args()
    rounds = given.rounds or 5
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", CODECARBON_LOG_LEVEL="critical")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(TRACKIO_DIR=scratch, WANDB_DIR=scratch)
        os.chdir(scratch)
        for framework, ways in WAYS.items():
            found: dict[str, list[list[Times]]] = {name: [] for name in ways}
            for number in range(rounds):
                folder = Path(scratch) / f"{framework}-{number}"
                for name, took in together(ways, given.steps, folder, seed=number).items():
                    found[name].append(took)
            show(framework, found, given.steps, rounds)
            tables.save(given.json, {framework: found})


def together(
    ways: dict[str, Training], steps: int, folder: Path, *, seed: int
) -> dict[str, list[Times]]:
    """What each step took each way, in turns by lot: whoever comes after another finds its own
    data out of the caches, by how much depends on the other."""
    context = multiprocessing.get_context("spawn")
    lines: dict[str, Connection] = {}
    processes = []
    for number, (name, train) in enumerate(ways.items()):
        own = folder / str(number)
        own.mkdir(parents=True)
        lines[name], line = context.Pipe()
        processes.append(context.Process(target=alone, args=(train, steps, own, line)))
        processes[-1].start()
    found: dict[str, list[Times]] = {name: [] for name in ways}
    for line in lines.values():  # all have made their first step
        line.recv()
    dice = random.Random(seed)
    for _ in range(1, steps):
        for name in dice.sample([*ways], len(ways)):
            lines[name].send(None)
            found[name].append(lines[name].recv())
    for line in lines.values():
        line.send(None)
    for process in processes:
        process.join()
    return found


def alone(train: Training, steps: int, folder: Path, line: Connection) -> None:
    """One training, in a process that does nothing else."""
    torch.set_num_threads(1)
    with quiet():
        train(steps, folder, Turns(line))


def show(framework: str, found: dict[str, list[list[Times]]], steps: int, rounds: int) -> None:
    """The table of one framework."""
    bare = [block for took in found[BARE] for block in blocks(took)]
    rows = []
    for name, turns in found.items():
        each = [block for took in turns for block in blocks(took)]
        own, every, clock = (
            [one[which] / other[which] for one, other in zip(each, bare, strict=True)]
            for which in range(3)
        )
        step_ms = statistics.median(one[2] for one in each) * 1e3 / BLOCK
        middle = (f"{statistics.median(ratios):.3f}" for ratios in (clock, own, every))
        by_clock, by_own, by_every = middle
        cells = (by_clock, interval(clock), by_own, interval(own), by_every)
        rows.append((name, f"{step_ms:.2f}", *cells))
    note = f"{tables.machine()}; {rounds} rounds of {steps} steps of {BATCH} x {LENGTH} tokens"
    tables.show(f"A training step under {framework}", HEADER, rows, note=note)


def blocks(took: list[Times]) -> list[Times]:
    """Sums over blocks of steps, without the first steps."""
    late = took[FIRST:]
    whole = range(0, len(late) - BLOCK + 1, BLOCK)
    sums = ([sum(one) for one in zip(*late[at : at + BLOCK], strict=True)] for at in whole)
    return [(own, every, clock) for own, every, clock in sums]


def interval(ratios: list[float]) -> str:
    """Of the median."""
    low, high = tables.median_interval(ratios)
    return f"{low:.3f} to {high:.3f}"


if __name__ == "__main__":
    main()
