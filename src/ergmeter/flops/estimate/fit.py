"""What to change where a training does not fit, and what each change makes of it.

The trap: advice by rule of thumb. Checkpointing shrinks activations and nothing else, ZeRO what
hangs on parameters and nothing else, so which of them helps is a matter of where the peak is. Each
change is therefore put through the same estimate as the plan itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError
from ergmeter.flops.batch import Batch, Sequences
from ergmeter.flops.estimate.memory import step_memory
from ergmeter.flops.graph.adapters import Lora

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.flops.estimate.arrangement import Setup
    from ergmeter.flops.graph.graph import Graph
    from ergmeter.flops.work import TrainedParts

AS_ASKED = "as asked"
# Where what a device holds does not grow with the batch, the search for the largest ends.
MOST_SEQUENCES = 2**40
_MOST_DEVICES = 2**14
_FELT = 0.995  # a change that leaves more than this of the peak is not worth a line
_ZERO = "--zero "
_LORA = Lora(16, ("all-linear",))
_LORA_SAID = "--lora r=16,targets=all-linear"


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training, as far as its memory is concerned."""

    graph: Graph
    batch: Batch
    training: TrainedParts
    setup: Setup

    def peak_bytes(self) -> float:
        """On the fullest device."""
        found = step_memory(self.graph, self.batch, training=self.training, setup=self.setup)
        return found.peak.total_bytes

    def of(self, sequences: int) -> TrainingJob:
        """The same with another number of sequences in a step."""
        return replace(self, batch=_resized(self.batch, sequences))

    @property
    def spread(self) -> int:
        """Micro-batches of a step, on all devices."""
        return self.setup.parallel.data * self.setup.micro_batches

    def on(self, data: int, zero: int) -> TrainingJob:
        """The same on more devices; the batch grows where it has no sequence for each of them."""
        parallel = replace(self.setup.parallel, data=data, zero=zero)
        job = replace(self, setup=replace(self.setup, parallel=parallel))
        return job.of(-(-self.batch.sequences // job.spread) * job.spread)


@dataclass(frozen=True, slots=True)
class Way:
    """A change, the peak with it, and the most sequences that there is then room for."""

    name: str
    peak_bytes: float
    most: int | None = None  # None: not even one, or no device is known
    fits: bool | None = None


def ways(job: TrainingJob, usable_bytes: float | None) -> list[Way]:
    """The plan itself, then changes that shrink it; where none is enough, several together."""
    asked = _tried(AS_ASKED, job, usable_bytes)
    found = [asked]
    for name, each in _changes(job):
        way = _tried(name, each, usable_bytes)
        if way.peak_bytes < _FELT * _to_beat(way, found):
            found.append(way)
    if usable_bytes is None or any(way.fits for way in found):
        return found
    for name, each in _together(job):
        way = _tried(name, each, usable_bytes)
        if way.peak_bytes < _FELT * min(before.peak_bytes for before in found):
            found.append(way)
        if way.fits:
            break
    spread = _spread(job, usable_bytes)
    return [*found, *([spread] if spread else [])]


def _to_beat(way: Way, found: list[Way]) -> float:
    """The peak as asked; of a stage of ZeRO, that of the stage below, which costs less traffic."""
    like = [each for each in found if each.name.startswith(_ZERO) and way.name.startswith(_ZERO)]
    return (like or found[:1])[-1].peak_bytes


def _tried(name: str, job: TrainingJob, usable_bytes: float | None) -> Way:
    peak = job.peak_bytes()
    if usable_bytes is None:
        return Way(name, peak)
    return Way(name, peak, micro_batch_max(job, usable_bytes), peak <= usable_bytes)


def _changes(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    """One option each."""
    how, setup = job.training, job.setup
    yield from _checkpointed(job, ("selective", "full"))
    if setup.kernels.loss == "logits":
        kernels = replace(setup.kernels, loss="fused")
        yield "--loss fused", replace(job, setup=replace(setup, kernels=kernels))
    if setup.output != "freed":
        yield "--output freed", replace(job, setup=replace(setup, output="freed"))
    if setup.optimizer in ("adamw", "adamw-loop"):
        yield "--optimizer adamw-fused", replace(job, setup=replace(setup, optimizer="adamw-fused"))
    is_full = how.lora is None and not how.frozen and how.trains is None
    if setup.optimizer.startswith("adamw") and setup.optimizer != "adamw-8bit" and is_full:
        yield "--optimizer adamw-8bit", replace(job, setup=replace(setup, optimizer="adamw-8bit"))
    if setup.parallel.data > 1:
        for stage in range(setup.parallel.zero + 1, 4):
            parallel = replace(setup.parallel, zero=stage)
            yield f"{_ZERO}{stage}", replace(job, setup=replace(setup, parallel=parallel))
    if is_full:
        yield from _adapted(job)
    elif how.lora is not None and setup.quantize is None:
        yield "--quantize nf4", replace(job, setup=replace(setup, quantize="nf4"))
    each = job.batch.sequences // setup.parallel.data
    if each > setup.micro_batches:
        yield f"--micro-batches {each}", replace(job, setup=replace(setup, micro_batches=each))


def _checkpointed(job: TrainingJob, modes: tuple[str, ...]) -> Iterator[tuple[str, TrainingJob]]:
    for mode in modes:
        if mode != job.training.checkpointing and job.training.checkpointing != "full":
            how = replace(job.training, checkpointing=mode)  # type: ignore[arg-type]
            yield f"--checkpointing {mode}", replace(job, training=how)


def _adapted(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    """Adapters in place of full training, where the model has modules for them."""
    adapted = replace(job, training=replace(job.training, lora=_LORA))
    try:
        adapted.peak_bytes()
    except UsageError:
        return
    yield _LORA_SAID, adapted
    yield (
        f"{_LORA_SAID} --quantize nf4",
        replace(adapted, setup=replace(adapted.setup, quantize="nf4")),
    )


def _together(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    """Several at once, each with those before it."""
    names: list[str] = []
    wanted = ("--zero 3", "--checkpointing full", "--loss fused", "--micro-batches")
    for start in wanted:
        for name, each in _changes(job):
            if name.startswith(start):
                names, job = [*names, name], each
                if len(names) > 1:
                    yield " ".join(names), job
                break


def _spread(job: TrainingJob, usable_bytes: float) -> Way | None:
    """On how many devices, by powers of two, FSDP with full checkpointing fits."""
    data = 2 * job.setup.parallel.data
    job = replace(job, training=replace(job.training, checkpointing="full"))
    while data * job.setup.parallel.tensor <= _MOST_DEVICES:
        each = job.on(data, 3)
        if each.peak_bytes() <= usable_bytes:
            said = f"--num-devices {each.setup.parallel.devices} --zero 3 --checkpointing full"
            if each.batch.sequences != job.batch.sequences:
                said += f" --batch-size {each.batch.sequences}"
            return _tried(said, each, usable_bytes)
        data *= 2
    return None


def micro_batch_max(job: TrainingJob, usable_bytes: float) -> int | None:
    """The most sequences that a device has room for at a time.

    What does not grow with the batch fits at any size: the search ends at MOST_SEQUENCES.
    """

    def fits(each: int) -> bool:
        return job.of(each * job.spread).peak_bytes() <= usable_bytes

    if not fits(1):
        return None
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if low >= MOST_SEQUENCES:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _resized(batch: Batch, sequences: int) -> Batch:
    """The same rows, more or fewer of them."""

    def scaled_count(each: Sequences) -> Sequences:
        return replace(each, count=-(-each.count * sequences // batch.sequences))

    others = {name: tuple(map(scaled_count, held)) for name, held in batch.others.items()}
    whole = (Sequences(batch.seq_len, sequences),)
    return Batch(sequences, batch.seq_len, whole, others)
