"""How did a cell end? One word and the line that says why, from its exit code and its output.

The trap: a pattern that knows one way of running out of memory. torch has renamed its exception,
CUDA, cuBLAS and the host's allocator each say it in their own words, a rank's line begins with
"[rank1]: ", and the kernel says nothing at all: it kills. A runner that misses one leaves a row
without figures that looks like a measurement. Words alone decide nothing where the command ended
well: a program may run out of memory, take a smaller batch and go on; nor where it went on and
then failed for another reason, as its last traceback says.
"""

from __future__ import annotations

import math
import re
import signal as signals
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Status: TypeAlias = Literal[
    "pending", "running", "ok", "oom", "error", "timeout", "diverged", "cancelled", "skipped"
]
# What is not run again when a bench is resumed.
FINAL: frozenset[Status] = frozenset({"ok", "oom", "error", "timeout", "diverged", "skipped"})

KILLED = 128 + signals.SIGKILL  # what a shell, a container and `erg record` make of a SIGKILL
_MEMORY = re.compile(
    r"\bOutOfMemoryError\b"
    r"|(?:CUDA|HIP|XPU|MPS|NCCL)\b[^\n]{0,60}\bout of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|RESOURCE_EXHAUSTED: [^\n]*[Oo]ut of memory"
    r"|\bMemoryError\b|std::bad_alloc|Cannot allocate memory"
    r"|Detected \d+ oom[-_]kill event|oom-kill event"
)
# How torchrun and accelerate tell that a rank was killed; their own exit code is then 1.
_RANK_KILLED = re.compile(r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\) received by PID")
_PREFIX = re.compile(r"^\[(?:rank|default)(\d+)\]:? ?|^(\d+): (?=Traceback|\s|[\w.]+(?::|$))")
_OPENS = "Traceback (most recent call last):"
_CHAINED = re.compile(
    r"During handling of the above exception|The above exception was the direct cause"
)
_CLOSES = re.compile(r"[A-Za-z_][\w.]*(?::| \(|$)")
# What other ranks and launchers say once a rank is gone: never the cause.
_CONSEQUENCES = re.compile(
    r"ChildFailedError|CalledProcessError|DistBackendError|DistNetworkError|SignalException"
    r"|Connection (?:closed|reset) by peer|ProcessRaisedException"
    r"|DistStoreError|Broken ?[Pp]ipe|Connection refused|ConnectionResetError|connectFullMesh"
)
_LAUNCHERS = re.compile(r"ChildFailedError|CalledProcessError|SignalException")
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """The status of a cell that has ended, and why, in one line; empty where all went well."""

    status: Status
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Raised:
    """The last line of a traceback, and whose it is (None where no rank is named)."""

    line: str
    rank: int | None = None
    place: int = field(default=0, compare=False)  # the number of its line
    is_chained: bool = False  # raised while the one before it was handled, or because of it

    def __str__(self) -> str:
        return self.line if self.rank is None else f"rank {self.rank}: {self.line}"


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """What the processes of one node said last, and their exit code."""

    stdout: str
    stderr: str
    exit_code: int | None = None

    @property
    def signal(self) -> int | None:
        """What ended it, if a signal did."""
        return -self.exit_code if self.exit_code is not None and self.exit_code < 0 else None

    def tells_cause(self) -> bool:
        """Whether its end is explained by it, and is no consequence of another's."""
        if _memory(self.exit_code, self.signal, self.stdout, self.stderr, None):
            return True
        return bool(_causes(_raised(self.stdout, self.stderr)))


def telling(nodes: Sequence[ParsedOutput]) -> ParsedOutput:
    """Of several nodes, given in the order in which they failed, the first that tells a cause.

    All of them together where none does. Put in a row by number they would read as if what the
    last node says came last.
    """
    for one in nodes if len(nodes) > 1 else ():
        if one.tells_cause():
            return one
    texts = [(one.stdout, one.stderr) for one in nodes]
    stdout, stderr = ("\n".join(one) for one in zip(*texts, strict=True))
    return ParsedOutput(stdout, stderr, nodes[0].exit_code)


def outcome(
    exit_code: int | None,
    *,
    signal: int | None = None,
    stdout: str = "",
    stderr: str = "",
    loss: float | None = None,
    timed_out_s: float | None = None,
    cancelled: str = "",
    broken: str = "",
    kernel_kills: int | None = None,
) -> CellOutcome:
    """What the end of a command was. `stdout` and `stderr` are their last parts.

    `loss` is the last one that is known; `kernel_kills` by how much the kernel's own count of
    processes it killed for memory rose meanwhile, where it can be read; `broken` what kept us from
    seeing it to its end.
    """
    if cancelled:
        return CellOutcome("cancelled", cancelled)
    if timed_out_s is not None:
        return CellOutcome("timeout", f"it was ended after {timed_out_s:g} s, its limit")
    is_well = exit_code == 0 and signal is None
    if is_well and (loss is None or math.isfinite(loss)):
        return CellOutcome("ok")
    if not is_well:
        lacking = _memory(exit_code, signal, stdout, stderr, kernel_kills)
        if lacking:
            return CellOutcome("oom", lacking)
    if loss is not None and not math.isfinite(loss):
        return CellOutcome("diverged", f"the loss became {loss}")
    if broken and not _causes(_raised(stdout, stderr)):
        return CellOutcome("error", _short(f"it was cut short: {broken}"))
    killed = _killed(exit_code, signal, stdout, stderr)
    if killed and not _causes(_raised(stdout, stderr)):
        return CellOutcome("error", f"{killed}; the kernel's count of OOM kills did not rise")
    return CellOutcome("error", _error(exit_code, signal, stdout, stderr))


def _memory(
    exit_code: int | None, signal: int | None, stdout: str, stderr: str, kills: int | None
) -> str:
    """How it ran out of memory; empty if it did not."""
    said = _said_of_memory(stdout, stderr)
    if said:
        return said
    if exit_code == KILLED and signal is None:
        # Somebody else saw the SIGKILL, perhaps on another machine: our kernel's count is not its.
        return f"exit code 137, as of what was killed (SIGKILL), {_by_whom(kills)}"
    what = _killed(exit_code, signal, stdout, stderr)
    return f"{what}, {_by_whom(kills)}" if what and kills != 0 else ""


def _killed(exit_code: int | None, signal: int | None, stdout: str, stderr: str) -> str:
    """Who was ended by a SIGKILL that was seen here; empty if nobody was."""
    if signals.SIGKILL in (signal, -(exit_code or 0)):
        return "it was killed (SIGKILL)"
    if _RANK_KILLED.search(stderr) or _RANK_KILLED.search(stdout):
        return "one of its ranks was killed (SIGKILL)"
    return ""


def _by_whom(kills: int | None) -> str:
    if kills is None:
        return "as the kernel's OOM killer does; its count of kills can't be read here"
    if kills > 0:
        return f"by the kernel's OOM killer: it counted {kills} meanwhile"
    return "as the kernel's OOM killer does; its count did not rise here"


def _said_of_memory(stdout: str, stderr: str) -> str:
    """The first line that says so, of stderr if it can be, and that was not got over."""
    above = stdout.splitlines()
    lines = [*above, *stderr.splitlines()]
    said = []
    for place, line in enumerate(lines):
        rank, bare = _unprefixed(line)
        # An indented line of a traceback is source text: it may just name the exception.
        if not bare.startswith("    ") and _MEMORY.search(bare):
            said.append(Raised(bare.strip(), rank, place))
    others = _of_other_causes(tracebacks(lines)) if said else []
    left = [one for one in said if not _is_got_over(one, others)]
    left.sort(key=lambda one: one.place < len(above))
    return _short(str(left[0])) if left else ""


def _is_got_over(said: Raised, others: Iterable[Raised]) -> bool:
    """Whether whoever said it went on, to fail later for another reason.

    One rank's lack of memory is the cause of what other ranks say after it.
    """
    return any(
        one.place > said.place and (said.rank is None or one.rank == said.rank) for one in others
    )


def _of_other_causes(raised: Iterable[Raised]) -> list[Raised]:
    """Tracebacks that lack of memory has no part in, and that are no consequences."""
    is_of_memory: dict[int | None, bool] = {}
    found = []
    for one in raised:
        before = one.is_chained and is_of_memory.get(one.rank, False)
        is_of_memory[one.rank] = before or bool(_MEMORY.search(one.line))
        if not is_of_memory[one.rank] and not _CONSEQUENCES.search(one.line):
            found.append(one)
    return found


def _error(exit_code: int | None, signal: int | None, stdout: str, stderr: str) -> str:
    raised = _raised(stdout, stderr)
    # Where a connection is all that is told of, it is the cause; what a launcher says never is.
    ranks = [one for one in raised if not _LAUNCHERS.search(one.line)]
    if raised:
        return _short(str((_causes(raised) or ranks or raised)[-1]))
    how = _how_it_ended(exit_code, signal)
    lines = [line.strip() for line in (stderr or stdout).splitlines() if line.strip()]
    return _short(f"{how}: {lines[-1]}" if lines else f"{how}, and it said nothing")


def _raised(stdout: str, stderr: str) -> list[Raised]:
    return [*tracebacks(stdout.splitlines()), *tracebacks(stderr.splitlines())]


def _causes(raised: Iterable[Raised]) -> list[Raised]:
    return [one for one in raised if not _CONSEQUENCES.search(one.line)]


def _how_it_ended(exit_code: int | None, signal: int | None) -> str:
    number = signal or (-exit_code if exit_code is not None and exit_code < 0 else None)
    if number is None:
        return f"exit code {exit_code}"
    try:
        return f"ended by {signals.Signals(number).name}"
    except ValueError:
        return f"ended by signal {number}"


def tracebacks(lines: Iterable[str]) -> Iterator[Raised]:
    """The last line of every traceback, in the order in which they end; ranks may be mixed."""
    is_open: set[int | None] = set()
    chained: set[int | None] = set()
    for place, line in enumerate(lines):
        rank, text = _unprefixed(line.rstrip())
        if text.lstrip(" +|").startswith(_OPENS):
            is_open.add(rank)
        elif rank in is_open and _CLOSES.match(text):  # what is indented is still inside
            yield Raised(text, rank, place, is_chained=rank in chained)
            is_open.discard(rank)
            chained.discard(rank)
        elif _CHAINED.match(text):
            chained.add(rank)


def _unprefixed(line: str) -> tuple[int | None, str]:
    found = _PREFIX.match(line)
    if found is None:
        return None, line
    return int(found[1] or found[2]), line[found.end() :]


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
