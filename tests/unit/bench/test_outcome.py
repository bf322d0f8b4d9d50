"""How a cell ended, from outputs as torch, CUDA, torchrun, SLURM and the kernel write them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.bench.execute.outcome import CellOutcome, ParsedOutput, telling, tracebacks
from ergmeter.bench.execute.outcome import outcome as outcome_of

TRACEBACK = """\
Traceback (most recent call last):
  File "/venv/lib/python3.12/site-packages/transformers/trainer.py", line 2241, in train
    return inner_training_loop(
           ^^^^^^^^^^^^^^^^^^^^
  File "/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", line 125, in forward
    return F.linear(input, self.weight, self.bias)
"""
# The last lines, as each of these libraries spells it.
OUT_OF_MEMORY = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total",
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.90",
    "RuntimeError: CUDA out of memory. Tried to allocate 1.53 GiB (GPU 0; 10.76 GiB total)",
    "RuntimeError: CUDA error: out of memory",
    "torch.AcceleratorError: CUDA error: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't"
    " allocate memory: you tried to allocate 4000000000000 bytes. Error code 12",
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.",
    "MemoryError",
]


def outcome(
    exit_code: int | None,
    *,
    stdout: str = "",
    stderr: str = "",
    signal: int | None = None,
    **how: Any,
) -> CellOutcome:
    return outcome_of(ParsedOutput(stdout, stderr, exit_code, signal), **how)


def prefixed(text: str, rank: int) -> str:
    return "".join(f"[rank{rank}]: {line}" for line in text.splitlines(keepends=True))


@pytest.mark.parametrize("line", OUT_OF_MEMORY)
@pytest.mark.parametrize("rank", [None, 1])
def test_every_way_of_saying_it_is_out_of_memory(line: str, rank: int | None) -> None:
    text = f"{TRACEBACK}{line}\n"
    said = text if rank is None else prefixed(text, rank)
    found = outcome(1, stderr=f"loading\n{said}W1116 torchrun: closing signal SIGTERM\n")
    assert found.status == "oom"
    assert line[:40] in found.reason
    assert ("rank 1" in found.reason) == (rank == 1)


def test_a_rank_out_of_memory_is_the_cause_of_what_the_others_say() -> None:
    said = (
        prefixed(TRACEBACK + OUT_OF_MEMORY[0] + "\n", 1)
        + prefixed(TRACEBACK + "torch.distributed.DistBackendError: NCCL error: remote exited\n", 0)
        + TRACEBACK
        + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    assert outcome(1, stderr=said).status == "oom"


def test_a_program_that_went_on_with_a_smaller_batch_is_well() -> None:
    assert outcome(0, stderr=TRACEBACK + OUT_OF_MEMORY[0]).status == "ok"


def test_a_source_line_that_names_the_exception_is_not_it() -> None:
    said = (
        'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n'
        "    handle(torch.OutOfMemoryError, step)\nKeyError: 'step'\n"
    )
    assert outcome(1, stderr=said).reason == "KeyError: 'step'"


@pytest.mark.parametrize(
    "how", [{"exit_code": 137}, {"exit_code": -9, "signal": 9}, {"exit_code": -9}]
)
def test_a_kill_is_the_kernels_and_says_how_sure_that_is(how: dict[str, Any]) -> None:
    code = how.pop("exit_code")
    unsure = outcome(code, **how)
    assert unsure.status == "oom"
    assert "OOM killer" in unsure.reason
    assert "rose by 2" in outcome(code, kernel_kills=2, **how).reason


@pytest.mark.parametrize("how", [{"exit_code": -9, "signal": 9}, {"exit_code": -9}])
def test_a_kill_that_the_kernel_did_not_count_is_an_error(how: dict[str, Any]) -> None:
    code = how.pop("exit_code")
    found = outcome(code, kernel_kills=0, **how)
    assert found.status == "error"
    assert found.reason == ("it was killed (SIGKILL); the kernel's count of OOM kills did not rise")
    said = "torch.OutOfMemoryError: CUDA out of memory."
    assert outcome(code, kernel_kills=0, stderr=said, **how).status == "oom"
    # An exit code alone may be of a kill on another machine, which our kernel does not count.
    assert outcome(137, kernel_kills=0).status == "oom"
    assert outcome(137, signal=9, kernel_kills=0).status == "error"


def test_torchrun_tells_of_a_rank_that_was_killed() -> None:
    said = "Root Cause (first observed failure):\n  rank : 1\n  exitcode  : -9 (pid: 4711)\n"
    assert outcome(1, stderr=said).status == "oom"
    assert outcome(1, stderr=said, kernel_kills=0).status == "error"
    assert outcome(1, stderr=said.replace("-9", "-11")).status == "error"


def test_slurm_tells_of_its_oom_killer() -> None:
    said = "slurmstepd: error: Detected 1 oom_kill event in StepId=12.batch. Some of the step"
    assert outcome(1, stderr=said).status == "oom"


def test_the_error_is_the_cause_and_not_its_consequence() -> None:
    said = (
        prefixed(TRACEBACK + "ValueError: expected 2 targets, got 3\n", 3)
        + prefixed(TRACEBACK + "RuntimeError: Connection closed by peer [127.0.0.1]:1234\n", 0)
        + TRACEBACK
        + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\n"
    )
    found = outcome(1, stderr=said)
    assert (found.status, found.reason) == (
        "error",
        "rank 3: ValueError: expected 2 targets, got 3",
    )


def test_ranks_that_write_at_once_are_told_apart() -> None:
    lines = [
        "[rank0]: Traceback (most recent call last):",
        "[rank1]: Traceback (most recent call last):",
        '[rank0]:   File "a.py", line 1, in <module>',
        '[rank1]:   File "a.py", line 1, in <module>',
        "[rank1]: IndexError: one",
        "[rank0]: KeyError: 'zero'",
    ]
    assert [(one.rank, one.line) for one in tracebacks(lines)] == [
        (1, "IndexError: one"),
        (0, "KeyError: 'zero'"),
    ]


def test_a_crash_in_an_import_is_an_error() -> None:
    said = TRACEBACK + "ModuleNotFoundError: No module named 'tuning'\n"
    assert outcome(1, stderr=said).reason == "ModuleNotFoundError: No module named 'tuning'"


@pytest.mark.parametrize(
    ("exit_code", "stderr", "reason"),
    [
        (2, "erg: --set takes KEY=VALUE\n\n", "exit code 2: erg: --set takes KEY=VALUE"),
        (3, "", "exit code 3, without any output"),
        (-11, "", "ended by SIGSEGV, without any output"),
    ],
)
def test_without_a_traceback_the_last_line_is_the_reason(
    exit_code: int, stderr: str, reason: str
) -> None:
    assert outcome(exit_code, stderr=stderr).reason == reason


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_loss_that_is_no_number_is_divergence(loss: float, exit_code: int) -> None:
    found = outcome(exit_code, loss=loss)
    assert found.status == "diverged"
    assert str(loss) in found.reason


def test_what_we_ended_ourselves_did_not_fail_by_itself() -> None:
    killed: dict[str, Any] = {"stderr": TRACEBACK + OUT_OF_MEMORY[0], "loss": math.nan}
    assert outcome(None, timed_out_s=30, **killed).status == "timeout"
    both = outcome(None, timed_out_s=30, cancelled="SIGTERM", **killed)
    assert both.status == "cancelled"


@given(st.text(), st.text(), st.integers(-64, 255))
def test_any_output_comes_to_one_line(stdout: str, stderr: str, exit_code: int) -> None:
    found = outcome(exit_code, stdout=stdout, stderr=stderr)
    assert (found.status == "ok") == (exit_code == 0)
    assert bool(found.reason) == (exit_code != 0)
    assert len(found.reason.splitlines()) <= 1


LATER = "KeyError: 'step'\n"


@pytest.mark.parametrize("rank", [None, 0])
def test_a_lack_of_memory_that_was_got_over_is_not_the_end(rank: int | None) -> None:
    said = TRACEBACK + OUT_OF_MEMORY[0] + "\ntrying half of it\n" + TRACEBACK + LATER
    found = outcome(1, stderr=said if rank is None else prefixed(said, rank))
    assert found.status == "error"
    assert "KeyError: 'step'" in found.reason
    log = f"WARNING {OUT_OF_MEMORY[0]}; half of it\n"
    assert outcome(1, stdout=log, stderr=TRACEBACK + LATER).status == "error"


def test_what_comes_of_a_lack_of_memory_is_one() -> None:
    first = TRACEBACK + OUT_OF_MEMORY[0] + "\n"
    for between in (
        "\nThe above exception was the direct cause of the following exception:\n\n",
        "\nDuring handling of the above exception, another exception occurred:\n\n",
    ):
        assert outcome(1, stderr=first + between + TRACEBACK + LATER).status == "oom"
    of_another_rank = prefixed(first, 1) + prefixed(TRACEBACK + LATER, 0)
    assert outcome(1, stderr=of_another_rank).status == "oom"
    again = TRACEBACK + LATER + first  # the error was got over, the lack of memory not
    assert outcome(1, stderr=again).status == "oom"


@pytest.mark.parametrize(
    "line",
    [
        "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//1",
        "RuntimeError: [1] is setting up NCCL communicator and retrieving id: Broken pipe",
        "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144]",
        "ConnectionResetError: [Errno 104] Connection reset",
    ],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_of_several_nodes_the_one_that_tells_the_cause_is_judged(line: str, is_last: bool) -> None:
    """Whichever number it has, and also if another ended before it."""
    cause = ParsedOutput("", TRACEBACK + OUT_OF_MEMORY[0] + "\n", 1)
    other = ParsedOutput("", TRACEBACK + line + "\n", 1)
    for nodes in ([cause, other], [other, cause])[:: -1 if is_last else 1]:
        said = telling(nodes)
        found = outcome(said.exit_code, stdout=said.stdout, stderr=said.stderr)
        assert (found.status, found.reason[:22]) == ("oom", "torch.OutOfMemoryError")


def test_the_node_that_failed_first_is_believed() -> None:
    first = ParsedOutput("", TRACEBACK + "ValueError: a bad batch\n", 1)
    then = ParsedOutput("", TRACEBACK + "RuntimeError: where did everybody go\n", 1)
    assert telling([first, then]) == first
    assert telling([then, first]) == then
    killed = ParsedOutput("", "", -9)
    assert telling([killed, then]).exit_code == -9
    silent = [ParsedOutput("a", "b", 3), ParsedOutput("c", "d", 1)]
    assert telling(silent) == ParsedOutput("a\nc", "b\nd", 3)


def test_a_connection_that_is_all_that_is_told_of_is_the_cause() -> None:
    refused = "ConnectionRefusedError: [Errno 111] Connection refused\n"
    launcher = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    found = outcome(1, stderr=prefixed(TRACEBACK + refused, 0) + TRACEBACK + launcher)
    assert found.reason == "rank 0: ConnectionRefusedError: [Errno 111] Connection refused"


def test_what_was_cut_short_is_judged_by_what_it_said() -> None:
    broken = "node 1 (far): [Errno 28] No space left on device"
    assert outcome(None, broken=broken).reason == f"it was cut short: {broken}"
    said = TRACEBACK + OUT_OF_MEMORY[0] + "\n"
    assert outcome(None, stderr=said, broken=broken).status == "oom"
    assert outcome(None, stderr=TRACEBACK + LATER, broken=broken).reason == LATER.strip()
