"""Modules without weights, made again elsewhere: what is sent, what is not, and at what price."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ergmeter.flops.counted import remote, skeleton
from ergmeter.flops.counted.meta_model import ModuleCall, TensorSpec
from ergmeter.flops.counted.remote import RecordedCall, StepRecord
from ergmeter.flops.counted.skeleton import dumps, serialised
from ergmeter.flops.counted.step_calls import count


def call_of(module: nn.Module, *shape: int) -> ModuleCall:
    given = TensorSpec(shape, torch.float32)
    flags = tuple(p.requires_grad for p in module.parameters())
    return ModuleCall(module, (given,), {}, True, True, flags)


def flops_of(module: nn.Module, *shape: int) -> Any:
    return count(serialised([[call_of(module, *shape)]]))[0][0]


def test_weights_are_not_sent() -> None:
    large, small = nn.Linear(2048, 2048), nn.Linear(2, 2)
    assert abs(len(dumps(large)) - len(dumps(small))) < 100
    # Forward and the weight's gradient; the input wants none.
    assert flops_of(large, 3, 2048).forward == 2 * 3 * 2048**2
    assert flops_of(large, 3, 2048).backward == 2 * 3 * 2048**2


def test_tied_weights_stay_one() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(8, 4), "b": nn.Linear(4, 8, bias=False)})
    model["a"].weight = model["b"].weight
    made = skeleton.loads(dumps(model))
    assert made["a"].weight is made["b"].weight


class HoldsALock(nn.Linear):
    def __init__(self, *, uses_random: bool) -> None:
        super().__init__(4, 4)
        self.lock, self.random, self.uses_random = threading.Lock(), torch.Generator(), uses_random
        self.table = np.zeros(100_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.uses_random:
            self.random.manual_seed(0)
        with self.lock:
            return super().forward(x)


def test_what_can_not_be_sent_is_named_only_where_it_is_used() -> None:
    assert flops_of(HoldsALock(uses_random=False), 2, 4).forward == 2 * 2 * 16
    assert "uses a Generator" in flops_of(HoldsALock(uses_random=True), 2, 4).error
    assert len(dumps(HoldsALock(uses_random=False))) < 10_000  # of a table only its shape


def test_a_cached_function_inside_another_is_sent() -> None:
    """As in torchtune, whose decorator for deprecated methods warns once."""

    @lru_cache(maxsize=1)
    def width() -> int:
        return 4

    class Cached(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.view(-1, width()))

    assert flops_of(Cached(4, 4), 2, 4).forward == 2 * 2 * 16


class HoldsAnEvent(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.event = threading.Event()  # which holds `lock.acquire`


def test_an_unused_method_of_a_lock_does_not_matter() -> None:
    found = flops_of(HoldsAnEvent(), 2, 4)
    assert (found.error, found.forward) == ("", 2 * 2 * 16)


class OwnOptimizer(torch.optim.SGD):
    pass


class MakesItsOptimizer(nn.Linear):
    def optimizer(self) -> torch.optim.Optimizer:
        return OwnOptimizer(self.parameters())


class WatchesSteps:
    def stepped(self, *_: object) -> None: ...


def test_an_optimizers_class_does_not_bring_who_watches_it() -> None:
    """As nanochat's model: torch wraps `step` in a function that refers to all hooks."""
    model = MakesItsOptimizer(4, 4)
    handle = register_optimizer_step_post_hook(WatchesSteps().stepped)
    try:
        model.optimizer()
        data = dumps(model)
    finally:
        handle.remove()
    assert b"WatchesSteps" not in data
    assert flops_of(model, 2, 4).forward == 2 * 2 * 16


class OwnDataset(torch.utils.data.Dataset[int]):
    pass


class NamesADataset(nn.Linear):
    # As values: `from __future__ import annotations` would leave texts.
    kinds = (OwnDataset | None, None | OwnDataset)


def test_a_union_of_a_class_that_is_not_sent_does_not_stop_a_count() -> None:
    """As litgpt's data modules, which its LoRA model's package brings along."""
    found = flops_of(NamesADataset(4, 4), 2, 4)
    assert (found.error, found.forward) == ("", 2 * 2 * 16)


def test_packages_in_a_folder_of_pip_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install --target FOLDER`; the program's own folder may have packages in it too."""
    target, own = tmp_path / "target", tmp_path / "own"
    for folder in (target, own):
        (folder / "layers-1.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(own), str(target), *sys.path])
    monkeypatch.chdir(own)
    skeleton.installed_folders.cache_clear()
    try:
        folders = skeleton.installed_folders()
    finally:
        skeleton.installed_folders.cache_clear()
    assert str(target) in folders
    assert str(own) not in folders


def test_a_device_named_in_a_forward_is_the_cpu() -> None:
    class OnCuda(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.cuda() + torch.ones(4, device="cuda"))

    assert flops_of(OnCuda(4, 4), 2, 4).forward == 2 * 2 * 16


def test_no_file_of_the_users_is_run_again(tmp_path: Path) -> None:
    """A program and a module beside it, both counted in a fresh Python that finds neither.

    The module refers to itself, and its function has a type variable, as litgpt's.
    """
    (tmp_path / "layers.py").write_text(
        textwrap.dedent("""
        open("layers-ran", "a").write("x")
        import sys
        from typing import TypeVar
        from torch import nn
        WIDTH = 6
        T = TypeVar("T")
        this = sys.modules[__name__]
        def double(x: T) -> T:
            return 2 * x * this.WIDTH
        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(WIDTH, WIDTH)
            def forward(self, x):
                return double(self.inner(x))
        """)
    )
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        open("train-ran", "a").write("x")
        import pathlib, sys, torch, layers
        from torch import nn
        from ergmeter.flops.counted import remote
        from ergmeter.flops.counted.meta_model import ModuleCall, TensorSpec
        from ergmeter.flops.counted.skeleton import serialised
        from ergmeter.flops.counted.remote import StepRecord
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = layers.Layer(), nn.Linear(6, 3)
            def forward(self, x):
                return self.second(layers.double(self.first(x)))
        given = TensorSpec((5, 6), torch.float32)
        request = serialised([[ModuleCall(Model(), (given,), {}, True, True, ())]])
        remote.write(request, StepRecord(), pathlib.Path("request"))
        """)
    )
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True)
    remote.start(tmp_path / "request", is_urgent=True)
    end_s = time.monotonic() + 120
    while (found := remote.result(tmp_path / "request")) is None and time.monotonic() < end_s:
        time.sleep(0.05)
    assert found is not None
    ((flops,),) = found
    assert (flops.error, flops.forward) == ("", 2 * 5 * (36 + 18))
    assert (tmp_path / "layers-ran").read_text() == "x"
    assert (tmp_path / "train-ran").read_text() == "x"


def test_the_counter_is_this_ergmeter_where_another_one_is_installed(tmp_path: Path) -> None:
    other = tmp_path / "site" / "ergmeter"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise ImportError('another version')")
    python = tmp_path / "python"  # its first folder of packages is `site`
    python.write_text(
        "#!/bin/sh\n"
        f"code=\"import sys; sys.path.insert(0, '{other.parent}'); $5\"; shift 5\n"
        f'exec "{sys.executable}" -I -W ignore -c "$code" "$@"\n'
    )
    python.chmod(0o755)
    folder = tmp_path / "request"
    remote.write(serialised([[call_of(nn.Linear(2, 2), 1, 2)]]), StepRecord(), folder)
    about = json.loads((folder / remote.REQUEST).read_text())
    (folder / remote.REQUEST).write_text(json.dumps({**about, "python": str(python)}))
    remote.start(folder, is_urgent=True)
    end_s = time.monotonic() + 120
    while (found := remote.result(folder)) is None and time.monotonic() < end_s:
        time.sleep(0.05)
    assert found is not None
    assert (found[0][0].error, found[0][0].forward) == ("", 2 * 2 * 2)


def test_a_counter_that_breaks_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "request"
    remote.write(serialised([[call_of(nn.Linear(2, 2), 1, 2)]]), StepRecord(), folder)
    (folder / "0.pickle").unlink()
    remote.start(folder, is_urgent=True)
    end_s = time.monotonic() + 120
    while (found := remote.result(folder)) is None and time.monotonic() < end_s:
        time.sleep(0.05)
    assert found is not None
    assert "the counting process failed (FileNotFoundError" in found[0][0].error


def test_a_record_is_the_same_when_it_is_read_back(tmp_path: Path) -> None:
    record = StepRecord(groups=((RecordedCall("Model", "model", 3),),), tokens=12, samples=4)
    request = serialised([[call_of(nn.Linear(2, 2), 1, 2)]])
    remote.write(request, record, tmp_path / "request")
    assert remote.record_of(tmp_path / "request") == record


def test_serialising_beside_a_training_pauses_until_the_training_is_over() -> None:
    """By the CPU time of its own thread, so that a busy machine makes no difference."""

    class Watched(threading.Event):
        def __init__(self) -> None:
            super().__init__()
            self.resumed_s, self.worked_s = time.thread_time(), list[float]()

        def wait(self, timeout: float | None = None) -> bool:
            self.worked_s.append(time.thread_time() - self.resumed_s)
            is_over = super().wait(timeout)
            self.resumed_s = time.thread_time()
            return is_over

    model, event = nn.Sequential(*(nn.Linear(4, 4) for _ in range(500))), Watched()
    begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
    paused = dumps(model, training_over=event)
    cpu_s, lasted_s = time.thread_time() - begin_cpu_s, time.perf_counter() - begin_s
    assert len(event.worked_s) > 10
    assert sorted(event.worked_s)[len(event.worked_s) * 9 // 10] < 0.002
    # 0.2 of 5.2 ms and what lies between two looks at the clock, twice that beside other programs.
    assert cpu_s < 0.3 * lasted_s
    event.set()
    begin_s = time.perf_counter()
    assert dumps(model, training_over=event) == paused
    assert time.perf_counter() - begin_s < lasted_s / 2
