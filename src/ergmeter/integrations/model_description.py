"""Describes the trained model in its run: parameters, dtype, FLOPs of a step.

The calls of the first two steps are recorded by shape; the second is counted, or the first if it is
the only one. FLOPs of a known configuration are computed on a thread of ours. Modules without one
are run without weights by another process (`flops.remote`), which this thread polls. The training
never waits for either; its end does, for a bounded time.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, ref

from ergmeter.errors import NotMeasurable
from ergmeter.flops.counted import remote
from ergmeter.flops.counted.op_totals import CallFlops
from ergmeter.flops.counted.remote import CountRequest, Lengths, StepRecord, step_flops
from ergmeter.flops.counted.unsharded import sizes, unsharded_parameters
from ergmeter.integrations.unsettled_steps import StepAmounts, TokenSums
from ergmeter.runlog import format as fmt
from ergmeter.runlog.process_group import agreed_word, framework_layout, world_size

if TYPE_CHECKING:
    from ergmeter.flops.counted.meta_model import ModuleCall
    from ergmeter.integrations.batches import Counts
    from ergmeter.integrations.torch.calls import StepRecorder
    from ergmeter.integrations.torch.roots import BatchLayout, InnerShapes
    from ergmeter.meter import Meter
    from ergmeter.meter.handover import HandOver
    from ergmeter.records import Flops

# -- which training a process belongs to -----------------------------------------------------------
# Two ranks that both call themselves 0 would be counted twice, and two trainings side by side in
# one command would be taken for two ranks of one training. So the framework is asked for the group,
# after the first batch, when the process group exists.


_trainings = itertools.count()
_in_group = itertools.count()  # counted apart: all ranks agree on it, also if one trained alone


def training_identity(model: object = None) -> dict[str, Any]:
    """Facts that distinguish this training from others in one run; its ranks share the id."""
    world = world_size()
    word = agreed_word(f"ergmeter/training/{next(_in_group)}") if world > 1 else None
    return {
        "id": word or secrets.token_hex(6),
        "world": world,
        "number": next(_trainings),
        **({} if model is None else {"model": _class_name(model)}),
        **_model_sizes(model),
        **({"layout": layout} if (layout := framework_layout(model)) else {}),
    }


def _class_name(model: object) -> str:
    """The class of a model, without wrappers of torch.compile or data parallelism."""
    if hasattr(model, "named_modules"):
        from ergmeter.flops.counted.meta_model import unwrapped  # noqa: PLC0415  torch is loaded then

        model = unwrapped(cast("Any", model))
    return type(model).__name__


def _model_sizes(model: object) -> dict[str, int]:
    """Parameters of the unsharded model, not of this rank's shard."""
    if not hasattr(model, "named_modules"):
        return {}
    totals = sizes(unsharded_parameters(model))
    return {} if totals is None else {"parameters": totals[0], "parameters_trained": totals[1]}


# -- the model and its FLOPs -----------------------------------------------------------------------

_STEPS = 2  # recorded steps
_SHORT_S = 1.0  # a shorter training is counted at its end, in this process where that is safe
_AT_THE_END_S = 10.0  # the longest that the end of a training waits for the count
_LOOK_S = 0.25
_IDENTITY_S = 1.0  # the longest that the end of a training waits for its identity
_WAITING = "the count of a step's FLOPs was not finished"
# FLOPs are counted again at the end if sequences were this much longer or shorter than the first.
_LENGTHS_ALIKE_FRAC = 0.01
_EQUAL_FRAC = 1e-6

_left: list[threading.Thread] = []  # threads of trainings that another one followed
_written: WeakKeyDictionary[Meter, tuple[Flops, ...]] = WeakKeyDictionary()


class Description:
    """Describes the model of one training to its Meter."""

    def __init__(self, meter: Meter, model: object, recorder: StepRecorder | None = None) -> None:
        """`recorder` records the module calls already, if given."""
        self.model = _weakly(model)  # weak: the program decides when its memory is freed
        self.is_settled = False  # nothing more is needed from the training's thread
        self._meter = meter
        # Declared by the user, and not written by an earlier training of the same Meter.
        self._declared_flops = () if meter.plan.flops is _written.get(meter) else meter.plan.flops
        self._inside: InnerShapes | None = None  # only during a framework's first step
        self._layout: BatchLayout | None = None
        self._recorder = recorder or _recorder_of(model)
        self._is_framework = recorder is None
        self._amounts: list[StepAmounts] = []
        self._thread: threading.Thread | None = None
        self._recorded = threading.Event()
        self._closing = threading.Event()
        self._groups: list[list[ModuleCall]] = []
        self._outer: dict[int, Any] = {}
        self._record: StepRecord | None = None
        self._request: CountRequest | None = None
        self._folder: Path | None = None
        self._counts: list[list[CallFlops]] | None = None
        self._sums: TokenSums | None = None  # of all steps, at the end
        self._lengths = Lengths()
        self._labelled_flops: list[float] = []  # of each recorded step: products of its labels
        self._recorded_index = 0  # of the recorded step that is counted
        self._writer_id = ""
        self._identified = threading.Event()
        self._is_left = False  # `erg record` finishes the count
        self._reread: Callable[[float, float], tuple[Flops, ...]] | None = None
        self._length = 0.0

    # -- on the training's thread -----------------------------------------------------------------

    def step_begun(self) -> None:
        """A framework's step begins: calls from here on are part of it."""
        if self._recorder is None:
            return
        self._recorder.is_paused = False
        model = self.model()
        if self._is_framework and self._layout is None and self._inside is None:
            from ergmeter.integrations.torch.roots import InnerShapes  # noqa: PLC0415

            self._inside = InnerShapes(cast("Any", model))  # a module, as it has a recorder

    def in_model_layout(self, counts: list[Counts]) -> list[Counts]:
        """Correct the counts of a framework's batches to what the model is called with.

        A batch may have one token more in each row than the model receives.
        """
        inside, self._inside = self._inside, None
        if inside is not None:
            for count in counts:
                if count.computed and isinstance(count.samples, int) and count.samples:
                    inside.inputs.add((count.samples, count.computed // count.samples))
            if self._recorder is not None:
                inside.called_with(self._recorder.ids_shapes)
            self._layout = inside.layout()
            inside.detach()
        layout = self._layout
        return counts if layout is None else [layout.applied(count) for count in counts]

    def step_over(self, counts: list[Counts], *, is_paused: bool = False) -> None:
        """End a step. `is_paused`: module calls before the next step begins are not recorded."""
        if self.is_settled:
            return
        self._amounts.append(StepAmounts.of(counts))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._describe, name="ergmeter-model", daemon=True
            )
            self._thread.start()
        recorder = self._recorder
        if recorder is None or recorder.step_over() >= _STEPS or recorder.failure:
            self._settle()
        else:
            recorder.is_paused = is_paused

    def _settle(self) -> None:
        self.is_settled = True
        if self._inside is not None:
            self._inside.detach()
        if self._recorder is not None:
            self._recorder.stop()
        self._recorded.set()

    def drop(self) -> None:
        """Stop describing this model: another one is trained."""
        self._closing.set()
        self._settle()

    def finish(self, sums: TokenSums, *, waits: bool = True) -> None:
        """Wait for the FLOP count, for a bounded time; the training may go on.

        With `waits` false, under `erg record`, do not wait: `erg record` finishes the count.
        """
        if self._thread is None:
            return
        give_up_s = time.monotonic() + _AT_THE_END_S
        self._settle()
        self._sums = sums
        self._is_left = not waits and _has_recorder(self._meter.path)
        self._closing.set()
        if self._is_left:
            self._identified.wait(_IDENTITY_S)
            _left.append(self._thread)
            return
        for thread in (self._thread, *_left):
            thread.join(max(0.0, give_up_s - time.monotonic()))
        if self._thread.is_alive():
            return
        with self._until_it_fails():
            self._lengths = self._all_lengths()
            self._count_at_the_end(give_up_s)
            self._count_lengths()

    # -- on a thread of ours ----------------------------------------------------------------------

    def _describe(self) -> None:
        handover = self._meter._handover
        if handover is None:
            return
        with self._until_it_fails():
            self._describe_to(handover)
        self._let_modules_go()

    def _describe_to(self, handover: HandOver) -> None:
        self._writer_id = handover.writer_id
        identity = training_identity(self.model())
        handover.describe(training=identity)
        self._identified.set()
        self._recorded.wait()
        if self._recorder is None:
            self._read_configuration(self._amounts[0].length)
            return
        if not self._recorder.steps:
            return
        self._read_step()
        assert self._record is not None
        if self._record.parameters:
            handover.describe(training={**identity, "parameters": self._record.parameters})
        if self._groups and not self._declared_flops:
            self._ask_for_count()

    def _let_modules_go(self) -> None:
        """Drop all references to the program's modules, so that they can be freed."""
        self._groups, self._outer = [], {}
        if self._recorder is not None:
            self._recorder.steps = []

    def _read_configuration(self, length: float) -> None:
        """Count the FLOPs of a model that is not a torch module: a configuration, say."""
        model = self.model()
        if model is not None and not self._declared_flops:
            self._length = length
            self._meter.describe(model, seq_len=round(length) or None)

    def _read_step(self) -> None:
        from ergmeter.integrations.torch.recorded_step import recorded_step  # noqa: PLC0415  loads torch

        assert self._recorder is not None
        steps = self._recorder.steps[:_STEPS]
        index = max(range(len(steps)), key=lambda n: (bool(steps[n].trained), n))
        step = steps[index]
        if not index:  # from before the first step: what ran without gradients may be evaluation
            step.calls = {key: call for key, call in step.calls.items() if call.has_grad}
        amounts = self._amounts[index]
        labels = self._recorder.labels
        loss = labels.module() if labels is not None and labels.module is not None else None
        self._labelled_flops = [step.labelled_flops(loss) for step in steps]
        self._recorded_index = index
        self._record, self._groups, self._reread = recorded_step(step, amounts, self.model(), loss)
        self._length, self._outer = amounts.length, step.outer
        self._recorder.steps = []
        if self._recorder.failure:
            failure = self._recorder.failure
            self._record = replace(
                self._record,
                not_counted=(*self._record.not_counted, f"calls after {failure}"),
                reason=f"ergmeter failed to record the calls of a step ({failure})",
            )
        self._write()

    def _ask_for_count(self) -> None:
        from ergmeter.flops.counted.skeleton import serialised  # noqa: PLC0415  loads torch

        assert self._record is not None
        self._request = serialised(self._groups, self._outer, self._closing)
        self._let_modules_go()
        if self._closing.wait(_SHORT_S) and not self._is_left:
            return
        self._begin_elsewhere()
        while not self._closing.wait(_LOOK_S):
            if self._is_counted():
                return
        if self._is_left and self._folder is not None:
            remote.write_lengths(self._folder, self._all_lengths())

    def _begin_elsewhere(self) -> None:
        """Have another process count the step: `erg record` if it runs, else one started here."""
        run = self._meter.path
        if self._request is None or self._record is None:
            return
        self._folder = remote.folder_for(run, self._writer_id, id(self))
        if self._is_left:
            self._lengths = self._all_lengths()
        try:
            remote.write(self._request, self._record, self._folder)
            remote.write_lengths(self._folder, self._lengths)
            if not _has_recorder(run):
                remote.start(self._folder)
        except (OSError, RuntimeError) as error:  # the latter while Python shuts down
            self._folder = None
            self._write(why_not=f"the process that counts FLOPs can't be started ({error})")

    def _is_counted(self) -> bool:
        """Write the count if it has arrived. True if it has."""
        result = remote.result(self._folder) if self._folder is not None else None
        if result is None:
            return False
        self._counts = result
        self._write()
        self._clear()
        return True

    def _clear(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            with suppress(OSError):
                self._folder.parent.rmdir()
            self._folder = None
        self._request = None

    # -- at the end -------------------------------------------------------------------------------

    def _count_at_the_end(self, give_up_s: float) -> None:
        if self._request is None or self._counts is not None or self._is_counted():
            return
        if may_count_here():
            if self._folder is not None:
                remote.stop(self._folder)
            from ergmeter.flops.counted.step_calls import count  # noqa: PLC0415  loads the counter

            self._counts = count(self._request)
            self._write()
            self._clear()
            return
        if self._folder is None:
            self._begin_elsewhere()
        if self._folder is None or _has_recorder(self._meter.path):
            return  # which finishes it when this program is gone
        remote.hurry(self._folder)
        while time.monotonic() < give_up_s:
            if self._is_counted():
                return
            time.sleep(_LOOK_S / 5)

    def _all_lengths(self) -> Lengths:
        """Mean sequence lengths over all steps, where they differ from the first step's."""
        sums = self._sums
        if sums is None or not sums.real or not self._length:
            return Lengths()
        is_padded = sums.computed > sums.real
        is_alike = abs(sums.length - self._length) <= _LENGTHS_ALIKE_FRAC * self._length
        lengths = Lengths() if is_alike and not is_padded else Lengths(sums.length, is_padded)
        is_on_labels = self._record is not None and self._record.is_head_on_labels
        frac = sums.loss / sums.real if is_on_labels and sums.loss else 0.0
        return replace(lengths, labelled_ratio=self._labelled_ratio(sums), labelled_frac=frac)

    def _labelled_ratio(self, sums: TokenSums) -> float:
        """Labelled positions per token over all steps, divided by those of the recorded step.

        1 unless two recorded steps show that FLOPs scale with the labels, and not with the tokens.
        """
        tokens = [amounts.tokens for amounts in self._amounts]
        steps = list(zip(self._labelled_flops, sums.first_losses, tokens, strict=False))
        if len(steps) < 2 or not sums.loss or not all(all(step) for step in steps):
            return 1.0
        by_label = [flops / (loss or 1) for flops, loss, _ in steps]
        by_token = [flops / (count or 1) for flops, _, count in steps]
        if not _are_equal(by_label) or _are_equal(by_token):
            return 1.0
        _, loss, count = steps[self._recorded_index]
        return sums.loss / sums.real / ((loss or 1) / (count or 1))

    def _count_lengths(self) -> None:
        """Count FLOPs again with the mean sequence lengths, which attention depends on."""
        length = self._lengths.length
        if self._lengths == Lengths():
            return
        if self._record is None:
            self._read_configuration(length)
            return
        frac = self._lengths.labelled_frac
        if self._reread is not None and (length or frac):
            analytic = self._reread(length or self._length, frac) or self._record.analytic
            self._record = replace(self._record, analytic=analytic)
        if self._folder is not None:
            remote.write_lengths(self._folder, self._lengths)
        self._write()

    @contextmanager
    def _until_it_fails(self) -> Iterator[None]:
        """A context: after an exception the run has no FLOPs, and the exception as the reason."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  the program's modules may fail in any way
            why = f"ergmeter failed to count FLOPs ({type(error).__name__}: {error})"[:500]
            if not self._declared_flops:
                self._meter.plan = replace(self._meter.plan, flops=(), no_flops=why)
                self._meter._header(flops=[], no_flops=why)

    # -- what is written --------------------------------------------------------------------------

    def _write(self, why_not: str = _WAITING) -> None:
        record, meter = self._record, self._meter
        assert record is not None
        uncounted = [[CallFlops(error=why_not)] * len(group) for group in record.groups]
        counts = self._counts or uncounted
        reason = ""
        flops: Sequence[Any] = ()
        try:
            flops = self._declared_flops or step_flops(record, counts, self._lengths)
        except NotMeasurable as error:
            reason = str(error)
        settings = meter.plan.settings
        settings = replace(
            settings,
            parameters=settings.parameters or record.parameters,
            dtype=settings.dtype or record.dtype,
        )
        meter.plan = replace(meter.plan, settings=settings, flops=tuple(flops), no_flops=reason)
        if not self._declared_flops:
            _written[meter] = meter.plan.flops
        meter._header(**{"flops": [], "no_flops": "", **meter.plan.facts()})


def _are_equal(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= _EQUAL_FRAC * max(values)


def may_count_here() -> bool:
    """True if running modules on meta tensors in this process can touch no accelerator."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    is_built = torch.version.cuda is not None or torch.version.hip is not None
    return not is_built and not torch.backends.mps.is_built()


def _has_recorder(run: Path) -> bool:
    """True if `erg record` started this program and writes `run`: then it counts FLOPs too."""
    recorded = os.environ.get(fmt.RUN_VARIABLE)
    return bool(recorded) and Path(recorded or "") == run and (run / ".hook").is_dir()


def _recorder_of(model: object) -> StepRecorder | None:
    """An armed recorder for a torch module; None for another model."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        return None
    from ergmeter.integrations.torch.calls import StepRecorder  # noqa: PLC0415  loads torch

    recorder = StepRecorder()
    recorder.is_paused = True  # until a step begins
    recorder.arm()
    return recorder


def _weakly(model: object) -> Callable[[], object]:
    """A weak reference to the model, where it allows one."""
    if model is None:
        return lambda: None
    try:
        return ref(model)
    except TypeError:  # a tree of arrays
        return lambda: model
