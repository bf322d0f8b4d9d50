"""Measures a loop of JAX, Flax or anything else that takes batches and dispatches asynchronously.

    training = JaxTraining(parameters=params)
    for batch in training(loader):
        state, loss = train_step(state, batch)

A jitted function returns before its work is done, so a step's time on the host is not the device's.
Waiting would slow the loop, so step times are the host's, and the run says so. Totals over many
steps are right, because the host blocks once the device's queue is full. They are exact up to where
the loop reads its loss.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import jax

from ergmeter.errors import FormatError, UsageError
from ergmeter.hlo import count_bytes
from ergmeter.integrations.batches import is_ids
from ergmeter.integrations.guard import Guarded, guarded
from ergmeter.integrations.training import LastRun, Training, failure
from ergmeter.meter import Meter
from ergmeter.records import Flops, Phase, Summary
from ergmeter.runlog.process_group import world_size

_Batch = TypeVar("_Batch")
_CLOCK = (
    "step times are the host's: jax returns before the work is done; totals are right over many"
    " steps, and exact up to where the loop looks at a result"
)
_NO_FLOPS = "a jax loop's FLOPs are counted if it passes flops=train_step.lower(state, batch)"
_AGAIN = "rematted_computation"  # what jax calls the part that jax.checkpoint computes again


class JaxTraining(LastRun, Guarded):
    """A training of a JAX loop, over one loader or several, one after the other."""

    def __init__(
        self,
        meter: Meter | None = None,
        *,
        parameters: Any = None,  # noqa: ANN401  a pytree of arrays, or their number
        flops: Any = None,  # noqa: ANN401  a Flops, or the lowered train step
        micro_steps: int = 1,
        first_step: int = 0,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """`meter` is used if given, else one that measures already, else one made of `options`.

        `parameters` is the pytree that is trained, or its number of elements. `flops` is the
        lowered train step, `train_step.lower(state, batch)`: its matrix products are counted in
        XLA's module, those in a loop as often as it runs. `micro_steps` batches make a step, as
        with `optax.MultiSteps`.
        """
        if micro_steps < 1:
            raise UsageError(f"micro_steps must be a whole number above 0; got {micro_steps!r}")
        if world_size() > 1:
            options.setdefault("rank", jax.process_index())
        self._training = Training(meter, **options)
        self._parameters = _number_of(parameters)
        self._flops, self._no_flops = _lowered_flops(flops)  # now: it may take a second
        self._shapes = _shapes(flops)
        self._micro_steps = micro_steps
        self._first_step = first_step
        self._done = 0  # micro-batches of the step under way
        self._logged: dict[str, Any] = {}
        self._is_described = False

    def __call__(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield the loader's batches: a step lasts from one batch to the next request."""
        self._begin()
        batches = iter(loader)
        while True:
            asked_ns = time.monotonic_ns()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._training.phase_over("data", asked_ns)
            with self.step(batch):
                yield batch

    @contextmanager
    def step(self, batch: object) -> Iterator[None]:
        """A context around the training on one batch, for a loop without a loader."""
        self._before(batch)
        try:
            yield
        except GeneratorExit:  # the loop over a loader was left, before it trained or after
            self._after() if self._logged else self._leave()
            raise
        except BaseException:  # the program's own, passed on: also when it is interrupted
            self._leave()
            raise
        self._after()

    def logged(self, **values: Any) -> None:  # noqa: ANN401
        """Add loss, learning_rate, grad_norm to this step; arrays are not waited for."""
        self._logged |= values

    def phase(self, phase: Phase) -> Any:  # noqa: ANN401  a context
        """A context for time outside training steps: eval, checkpoint, data."""
        self._begin()
        return self._training.phase(phase)

    def end(self, ended: str | None = None) -> None:
        """End the training. Otherwise it ends with the program."""
        self._training.step_cancelled()
        self._training.end(ended)

    def summary(self) -> Summary:
        """End the training, and return every metric of its run."""
        self.end()
        return super().summary()

    def __enter__(self) -> JaxTraining:
        self._begin()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.end(failure(error) if error is not None else None)

    # -- inside ---------------------------------------------------------------------------------

    @guarded
    def _before(self, batch: object) -> None:
        self._begin()
        if not self._is_described:
            self._tell(batch)
        self._training.step_begin()
        for part in _local(batch):
            self._training.batch(part)

    @guarded
    def _after(self) -> None:
        self._done += 1
        if self._done == self._micro_steps:
            self._done = 0
            self._training.step_end(micro_steps=self._micro_steps)
            logged, self._logged = self._logged, {}
            self._training.logged(logged)

    @guarded
    def _leave(self) -> None:
        self._done = 0
        self._training.step_cancelled()
        self._training.mark("step_left", "the loop was left inside a step, which is not counted")

    @guarded
    def _begin(self) -> None:
        if self._meter is None and not self._training.failed:
            self._training.begin(first_step=self._first_step)
            self._training.mark("host_clock", _CLOCK)
            self._meter = self._training.meter

    def _tell(self, batch: object) -> None:
        """Add model size and FLOPs of a step to the run, at the first batch."""
        self._is_described = True
        meter = self._training.meter
        if meter is None:
            return
        flops, reason = self._flops, self._no_flops
        ids = next((leaf for leaf in jax.tree.leaves(batch) if is_ids(leaf)), None)
        if self._shapes and flops:
            if ids is None or tuple(ids.shape) not in self._shapes:
                flops, reason = (), "flops= was lowered for another shape than the first batch's"
            else:
                flops = (replace(flops[0], tokens_per_step=prod(ids.shape)),)
        if not flops and meter.plan.flops:  # the Meter was given some
            flops, reason = meter.plan.flops, meter.plan.no_flops
        settings = meter.plan.settings
        settings = replace(settings, parameters=settings.parameters or self._parameters)
        meter._revise(settings=settings, flops=flops, no_flops=reason)


def _number_of(parameters: Any) -> int | None:  # noqa: ANN401
    """The number of elements of a pytree, over all devices."""
    if parameters is None or isinstance(parameters, int):
        return parameters
    leaves = jax.tree.leaves(parameters)
    sizes: list[int] = [prod(leaf.shape) for leaf in leaves if hasattr(leaf, "shape")]
    return sum(sizes)


def _local(batch: Any) -> list[Any]:  # noqa: ANN401
    """The batch, or the rows that this process feeds where several feed one array.

    A computation on a global array would need all processes to do the same at the same time.
    """
    leaves, form = jax.tree.flatten(batch)
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        return [batch]
    rows = [_own_rows(leaf) for leaf in leaves]
    if any(pieces is None for pieces in rows) or len({len(pieces or ()) for pieces in rows}) != 1:
        return [None]  # cut along its sequences, or in several ways: its tokens are unknown
    return [jax.tree.unflatten(form, part) for part in zip(*rows, strict=True)]


def _own_rows(array: Any) -> list[Any] | None:  # noqa: ANN401
    if getattr(array, "is_fully_addressable", True):
        return None
    pieces = [shard.data for shard in array.addressable_shards if shard.replica_id == 0]
    whole_rows = all(piece.shape[1:] == array.shape[1:] for piece in pieces)
    return pieces if pieces and whole_rows else None


def _shapes(lowered: Any) -> set[tuple[int, ...]]:  # noqa: ANN401
    """Shapes of all arguments of a lowered function."""
    if not hasattr(lowered, "args_info"):
        return set()
    return {tuple(leaf.shape) for leaf in jax.tree.leaves(lowered.args_info)}


def _lowered_flops(lowered: Any) -> tuple[tuple[Flops, ...], str]:  # noqa: ANN401
    """The FLOPs of a lowered train step, or the reason why there are none."""
    if lowered is None:
        return (), _NO_FLOPS
    if isinstance(lowered, Flops):
        return Flops.checked(lowered), ""
    if not hasattr(lowered, "compiler_ir"):
        kind = type(lowered).__name__
        return (), f"flops= takes train_step.lower(state, batch), not yet compiled; got a {kind}"
    module = lowered.compiler_ir(dialect="hlo").as_serialized_hlo_module_proto()
    try:
        count = count_bytes(module, "the train step")
    except FormatError as error:
        return (), str(error)
    if _AGAIN.encode() in module:
        return (), "jax.checkpoint computes a part twice, and its FLOPs can't be separated"
    unknown = (*count.unknown_loops, *count.unknown_calls)
    if unknown:
        return (), f"parts of the compiled step can't be counted: {', '.join(unknown)}"
    if count.scope == "shard_map":
        return (), (
            "products inside shard_map have one device's shapes, and those outside all devices':"
            " pass the FLOPs of a step as Flops(...)"
        )
    assumptions = ["products of the train step as it was lowered; elementwise work is left out"]
    if count.uneven_branches:
        assumptions.append("a conditional counts as its costliest branch: an upper bound")
    if count.uncounted_calls:
        assumptions.append(f"not counted: {', '.join(count.uncounted_calls)} (no matrix products)")
    flops = Flops(
        model_per_step=float(count.flops),
        convention="hlo",
        engine="hlo",
        assumptions=tuple(assumptions),
    )
    return (flops,), ""
