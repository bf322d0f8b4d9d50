"""`watch`: any torch loop, seen in this process. The hook of `erg record` sees as it does."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn

from ergmeter.errors import UsageError
from ergmeter.integrations.torch.steps import Loop
from ergmeter.integrations.torch_loop import Watched, watch
from ergmeter.integrations.training import Training
from ergmeter.meter import Meter, active_meters
from ergmeter.records import PHASES, Reading
from ergmeter.runlog.reader import Run

ROWS, LENGTH = 2, 8


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.head = nn.Linear(8, 32)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = self.head(self.embed(ids))
        return found


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def ids() -> torch.Tensor:
    return torch.randint(0, 32, (ROWS, LENGTH))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def steps(watched: Watched, phase: str = "train") -> dict[str, Any]:
    watched.close()
    found = Run.open(watched.path).steps()
    rows = found["phase"] == PHASES.index(phase)
    return {name: column[rows] for name, column in found.items()}


@pytest.fixture
def watching(tmp_path: Path) -> Callable[..., Watched]:
    def make(*given: Any, **options: Any) -> Watched:
        return watch(*given, **{"out": tmp_path / "run", "probes": [], **options})

    return make


def test_the_model_and_the_optimizer_are_found_out(watching: Callable[..., Watched]) -> None:
    before = nn.Module.__call__
    watched = watching()
    other, model = Small(), Small()
    optimizer = sgd(model)
    for _ in range(3):
        other(torch.zeros(1, 5, dtype=torch.long))  # is not trained
        model(ids()).sum().backward()
        optimizer.step()
    found = steps(watched)
    assert found["tokens_computed"].tolist() == [ROWS * LENGTH] * 3
    assert nn.Module.__call__ is before  # nothing is left behind


def test_a_step_that_a_scaler_skips_counts_with_the_next(watching: Callable[..., Watched]) -> None:
    model = Small()
    optimizer = sgd(model)
    watched = watching(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for is_broken in (False, True, False):
        loss = model(ids()).sum()
        scaler.scale(loss * (float("inf") if is_broken else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found = steps(watched)
    assert found["tokens_computed"].tolist() == [ROWS * LENGTH, 2 * ROWS * LENGTH]
    assert found["micro_steps"].tolist() == [1, 2]


def test_a_model_that_was_compiled_in_place_is_seen(watching: Callable[..., Watched]) -> None:
    model, compiled = Small(), []

    def backend(graph: Any, _given: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model.compile(backend=backend)
    optimizer = sgd(model)
    watched = watching(model, optimizer)
    for _ in range(3):
        model(ids()).sum().backward()
        optimizer.step()
    assert steps(watched)["tokens_computed"].tolist() == [ROWS * LENGTH] * 3
    assert len(compiled) == 1  # and once only


def test_what_is_recomputed_for_the_backward_pass_is_counted_once(
    watching: Callable[..., Watched],
) -> None:
    from torch.utils.checkpoint import checkpoint

    model = Small()
    optimizer = sgd(model)
    watched = watching(model, optimizer)
    checkpoint(model, ids(), use_reentrant=False).sum().backward()
    optimizer.step()
    assert steps(watched)["tokens_computed"].tolist() == [ROWS * LENGTH]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_model_that_is_watched_can_be_copied_pickled_saved_and_scripted(
    watching: Callable[..., Watched],
) -> None:
    model = Small()
    optimizer = sgd(model)
    watched = watching(model, optimizer)
    model(ids()).sum().backward()
    optimizer.step()
    given = ids()
    kept = io.BytesIO()
    torch.save(model, kept)
    assert b"ergmeter" not in kept.getvalue()
    scripted: Any = torch.jit.script(model)
    copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), scripted)
    for other in copies:
        assert torch.equal(other(given), model(given))
    model(ids()).sum().backward()
    optimizer.step()
    # The call above, in training mode and with gradients, is taken for the step's.
    assert steps(watched)["tokens_computed"].tolist()[0] == ROWS * LENGTH


def test_evaluation_without_eval_mode_ends_where_the_next_batch_is_fetched(
    watching: Callable[..., Watched],
) -> None:
    from torch.utils.data import DataLoader

    model = Small()
    optimizer = sgd(model)
    watched = watching(model, optimizer)
    rows: Any = torch.zeros(8, LENGTH, dtype=torch.long)
    for batch in DataLoader(rows, batch_size=ROWS):
        model(batch).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(ids())
            model(ids())
    evaluated, waited = steps(watched, "eval"), steps(watched, "data")
    trained = steps(watched)
    assert trained["tokens_computed"].tolist() == [ROWS * LENGTH] * 4
    assert len(evaluated["start_ns"]) == 4  # the last ends with its last forward
    assert len(waited["start_ns"]) == 4
    assert np.all(evaluated["end_ns"][:3] <= waited["start_ns"][1:])
    assert np.all(evaluated["end_ns"] > evaluated["start_ns"])


@pytest.mark.parametrize("is_given", [True, False])
def test_an_evaluation_before_the_first_step_is_the_trainings(
    watching: Callable[..., Watched], is_given: bool
) -> None:
    model, other = Small(), Small()
    if is_given:
        optimizer = sgd(model)
        watched = watching(model, optimizer)
    else:
        watched = watching()
        optimizer = sgd(model)
    began_ns = time.monotonic_ns()
    model.eval()
    with torch.no_grad():
        model(ids())
        other(ids())  # of a model that is not trained
        model(ids())
    ended_ns = time.monotonic_ns()
    model.train()
    time.sleep(0.05)  # and this is none of it
    model(ids()).sum().backward()
    optimizer.step()
    evaluated = steps(watched, "eval")
    assert began_ns <= evaluated["start_ns"].item() < evaluated["end_ns"].item() <= ended_ns
    assert len(steps(watched)["start_ns"]) == 1


def test_a_model_loaded_in_eval_mode_that_is_not_called_evaluates_nothing(
    watching: Callable[..., Watched],
) -> None:
    model = Small().eval()
    optimizer = sgd(model)
    watched = watching(model, optimizer)
    model.train()
    model(ids()).sum().backward()
    optimizer.step()
    model.eval()
    assert len(steps(watched, "eval")["start_ns"]) == 0


def test_a_loss_is_kept_with_its_step(watching: Callable[..., Watched]) -> None:
    model = Small()
    optimizer = sgd(model)
    watched = watching(model, optimizer)
    for number in range(3):
        model(ids()).sum().backward()
        optimizer.step()
        watched.logged(loss=float(number))
    assert steps(watched)["loss"].tolist() == [0.0, 1.0, 2.0]


def test_a_count_that_fails_holds_on_to_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("ergmeter.flops.counted.skeleton.serialised", refuse)
    training = Training(out=tmp_path / "run", probes=[])
    loop = Loop(lambda: training)
    model = Small()
    optimizer = sgd(model)
    loop.optimizer_made(optimizer)
    for _ in range(3):
        model(ids()).sum().backward()
        loop.stepped(optimizer)
    trained = ref(model)
    del optimizer, model
    loop.stop()
    gc.collect()
    assert trained() is None
    reason = Run.open(tmp_path / "run").writers[0].header["no_flops"]
    assert reason == "ergmeter failed to count FLOPs (RuntimeError: no)"


def test_an_optimizer_where_a_dead_one_was_begins_a_training_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Training] = []

    def make() -> Training:
        made.append(Training(out=tmp_path / f"run{len(made)}", probes=[]))
        return made[-1]

    monkeypatch.setattr("ergmeter.integrations.torch.steps.id", lambda _: 7, raising=False)
    loop = Loop(make)
    for _ in range(2):
        model = Small()
        optimizer = sgd(model)
        loop.optimizer_made(optimizer)
        for _ in range(3):
            model(ids()).sum().backward()
            loop.stepped(optimizer)
        was, trained = ref(optimizer), ref(model)
        del optimizer, model
        assert was() is None
    loop.stop()
    # Nothing holds on to what the program has let go. On a busy machine a thread of ours may need
    # longer than `stop` waits.
    end_s = time.monotonic() + 100
    while trained() is not None and time.monotonic() < end_s:
        gc.collect()
        time.sleep(0.01)
    assert trained() is None
    for number in range(2):
        rows = Run.open(tmp_path / f"run{number}").steps()
        assert rows["tokens_computed"].tolist() == [ROWS * LENGTH] * 3


def test_what_is_no_model_or_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"must be a torch\.nn\.Module; got a str"):
        watch("model")
    with pytest.raises(UsageError, match="must be a torch optimizer; got a int"):
        watch(optimizer=3)


def test_where_nothing_stepped_there_is_no_run(watching: Callable[..., Watched]) -> None:
    watched = watching()
    watched.close()
    with pytest.raises(UsageError, match="no optimizer has stepped"):
        _ = watched.path


def marks(watched: Watched) -> dict[str, str]:
    watched.close()
    return {one.name: one.detail for one in Run.open(watched.path).marks}


def test_a_replica_of_data_parallel_is_not_called_as_the_original(
    watching: Callable[..., Watched],
) -> None:
    model = Small()
    watched = watching(model, sgd(model))
    replica: Any = model._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    replica.forward = lambda given: given
    assert replica("its own") == "its own"
    assert model(ids()).shape == (ROWS, LENGTH, 32)
    watched.close()


def test_what_saves_can_still_be_pickled(watching: Callable[..., Watched]) -> None:
    watching().close()
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save


def test_a_step_whose_model_was_not_seen_is_as_long_as_from_the_one_before(
    watching: Callable[..., Watched],
) -> None:
    model = Small()
    optimizer = sgd(model)
    watched = watching(Small(), optimizer)  # another than the loop calls
    for _ in range(4):
        model(ids()).sum().backward()
        optimizer.step()
    found = steps(watched)
    assert len(found["start_ns"]) == 3  # nobody knows when the first began
    assert found["start_ns"][1:].tolist() == found["end_ns"][:-1].tolist()
    assert "no call of the model was seen" in marks(watched)["step_starts_not_seen"]


def test_what_another_thread_saves_or_fetches_is_not_waited_for(
    watching: Callable[..., Watched], tmp_path: Path
) -> None:
    model = Small()
    optimizer = sgd(model)
    watched = watching(model, optimizer)

    def train() -> None:
        model(ids()).sum().backward()
        optimizer.step()

    def aside() -> None:
        torch.save(model.state_dict(), tmp_path / "aside.pt")
        next(iter(torch.utils.data.DataLoader(Numbers())))

    train()
    thread = threading.Thread(target=aside)
    thread.start()
    thread.join()
    train()
    torch.save(model.state_dict(), tmp_path / "own.pt")
    train()
    assert len(steps(watched, "checkpoint")["end_ns"]) == 1
    assert len(steps(watched, "data")["end_ns"]) == 0


def test_whoever_else_stands_before_the_call_of_modules_stays_there(
    watching: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watching()
    model = Small()
    optimizer = sgd(model)  # from here on calls are looked at
    seen, before = [], nn.Module.__call__

    def theirs(self: nn.Module, *given: Any, **named: Any) -> Any:
        seen.append(type(self).__name__)
        return before(self, *given, **named)

    monkeypatch.setattr(nn.Module, "__call__", theirs)
    for _ in range(3):
        model(ids()).sum().backward()
        optimizer.step()
    assert seen == ["Small", "Embedding", "Linear"] * 3
    assert nn.Module.__call__ is theirs
    assert steps(watched)["tokens_computed"].tolist() == [ROWS * LENGTH] * 3


def test_after_it_has_made_way_a_loop_is_told_again(tmp_path: Path) -> None:
    """As the hook of `erg record`: a Meter of the program's own comes and goes."""
    made: list[Training] = []

    def make() -> Training | None:
        if active_meters.meters():
            return None
        made.append(Training(out=tmp_path / f"hook-{len(made)}", probes=[], looks_on=True))
        return made[-1]

    model = Small()
    optimizer = sgd(model)
    loop = Loop(make, is_recorded_elsewhere=lambda: bool(active_meters.meters()), root=model)
    handle = optimizer.register_step_post_hook(loop.stepped)
    for turn in range(9):
        meter = Meter(tmp_path / "own", probes=[]).start() if turn == 3 else None
        if turn == 6:
            active_meters.meters()[0].close()
        model(ids()).sum().backward()
        optimizer.step()
        assert meter is None or loop.training is None or loop.training.failed
    handle.remove()
    loop.stop()
    counts = [len(Run.open(tmp_path / f"hook-{n}").steps()["end_ns"]) for n in range(len(made))]
    assert counts == [3, 3]


@pytest.mark.parametrize("how", ["autocast", "accelerate", "fabric"])
def test_what_products_are_in_is_seen_where_weights_do_not_say(
    watching: Callable[..., Watched], how: str
) -> None:
    model: Any = Small()
    optimizer: Any = sgd(model)
    around: Any = nullcontext()
    backward: Any = torch.Tensor.backward
    if how == "autocast":
        around = torch.autocast("cpu", torch.bfloat16)
    elif how == "accelerate":
        accelerate = pytest.importorskip("accelerate")
        # A Trainer of another test may have left its state in this process.
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        fabric = pytest.importorskip("lightning.fabric").Fabric(
            accelerator="cpu", devices=1, precision="bf16-mixed"
        )
        model, optimizer = fabric.setup(model, optimizer)
        backward = fabric.backward
    watched = watching(model, optimizer)
    for _ in range(2):
        with around:
            loss = model(ids()).sum()
        backward(loss)
        optimizer.step()
    watched.close()
    assert Run.open(watched.path).settings["dtype"] == "bf16"
    if how == "accelerate":
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_summary_is_of_the_steps_so_far_and_the_loop_goes_on(
    watching: Callable[..., Watched],
) -> None:
    model = Small()
    optimizer = sgd(model)
    watched = watching(model, optimizer, warmup_steps=0)
    counts = []
    for _ in range(2):
        for _ in range(4):
            model(ids()).sum().backward()
            optimizer.step()
        found = watched.summary().readings["tokens.total"]
        assert isinstance(found, Reading)
        counts.append(found.value)
    assert counts == [4 * ROWS * LENGTH, 8 * ROWS * LENGTH]
    assert len(steps(watched)["end_ns"]) == 8


def test_one_that_another_took_the_place_of_says_so(watching: Callable[..., Watched]) -> None:
    model = Small()
    optimizer = sgd(model)
    first = watching(model, optimizer)
    second = watching(model, optimizer)
    model(ids()).sum().backward()
    optimizer.step()
    with pytest.raises(UsageError, match="a later `watch` replaced this one"):
        first.summary()
    assert len(steps(second)["end_ns"]) == 1
