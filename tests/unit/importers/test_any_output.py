"""Any output at all: no importer raises, holds on to it, or makes an empty step of it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.importers.hf_trainer import HfTrainerImporter
from ergmeter.importers.keyvalue import KeyValueImporter
from ergmeter.importers.megatron import EfficientLlmImporter, MegatronImporter
from ergmeter.importers.nxdt import NxdtImporter
from ergmeter.importers.torchtitan import TorchTitanImporter
from ergmeter.ports import Importer, Line
from ergmeter.records import Record
from tests.unit.importers.captured import marks, steps

S = 1_000_000_000
IMPORTERS: list[Importer] = [
    KeyValueImporter(),
    KeyValueImporter(tokens_are="step"),
    KeyValueImporter(tokens_are="line"),
    KeyValueImporter(tokens_are="total"),
    HfTrainerImporter(),
    EfficientLlmImporter(),
    MegatronImporter(),
    NxdtImporter(),
    TorchTitanImporter(),
]

WORDS = [
    "step",
    "loss",
    "tokens",
    "total_tokens",
    "=",
    ": ",
    " ",
    "|",
    "1",
    "2048",
    "9" * 40,
    "1e999",
    "nan",
    "-5",
    "{",
    "}",
    "'",
    '"',
    ",",
    "\x00",
    "\x1b[A",
    "5%|",
    "/",
    " [",
    "µs",
    "k",
    "\u0661",
    "%",
    "step_time",
    "dt",
    "2026-11-15 10:00:00",
    "2026-99-99 10:00:00",
    "iter ",
]
DICT_WORDS = [
    "{'loss': ",
    "'2.5'",
    "nan",
    ", 'learning_rate': ",
    "1e999",
    ", 'epoch': ",
    "0.1",
    "-1",
    "}",
    "{'eval_runtime': ",
    ", 'num_input_tokens_seen': ",
    "5",
    "9" * 40,
    "'train_runtime': ",
    "0",
    ", 'train_tokens_per_second': 5",
    " 5%|x| 3/20 [",
    "\x1b[A",
    "0%|| 0/0 [",
    "\x00",
    "{'",
    "}",
]
dicts = st.builds(
    lambda names, values: str(dict(zip(names, values, strict=False))),
    st.permutations(
        [
            "epoch",
            "loss",
            "learning_rate",
            "num_tokens",
            "train_runtime",
            "eval_runtime",
            "num_input_tokens_seen",
            "train_loss",
            "train_tokens_per_second",
        ]
    ),
    st.lists(st.floats() | st.integers() | st.text(max_size=5), max_size=9),
)
# Lines of programs, of which a mixture is made.
n, small = st.integers(0, 40), st.integers(0, 3)
lines_of_programs = (
    st.builds("step={} loss={} tokens={}".format, n, small, small)
    | st.builds("epoch={} step={} total_tokens={}".format, small, n, n)
    | st.builds("[rank{}]: step={} batch_tokens=9".format, small, n)
    | st.builds("iter {}: loss 2.{}, time {}ms".format, n, small, n)
    | st.builds("step={} val_loss=2.{}".format, n, small)
    | st.builds("eval step={} loss=9.{} tokens=9".format, n, small)
    | st.builds("{}/40 [00:01<00:09, 9it/s, loss=2.{}]".format, n, small)
    | st.builds("Epoch {}: 5%|x | {}/40 [00:01<00:09, 9it/s, loss=2]".format, small, n)
    | st.builds(" 5%|x | {}/40 [00:01<00:09, 9it/s]".format, n)
    | st.builds(
        "{{'loss': 2.{}, 'learning_rate': 1e-4, 'epoch': {}, 'num_tokens': {}}}".format,
        small,
        n.map(lambda i: i / 10),
        n,
    )
    | st.builds("{{'eval_loss': 2, 'eval_runtime': 0.{}, 'epoch': {}}}".format, small, small)
    | st.builds("{{'train_runtime': {}, 'train_loss': 2, 'epoch': {}}}".format, n, small)
    | st.builds("step_time: 0.{}".format, n)
    | st.builds("throughput: {}".format, n)
    | st.builds("loss: {} step: {}".format, small, n)
    | st.builds(
        "Epoch {}: 5%|x | {}/40 [00:{:02d}<00:09, reduced_train_loss=2, global_step={}.0, "
        "consumed_samples={}]".format,
        small, n, n, n, st.sampled_from(["32.0", "64.0", "1.2e+5", "nan", "-1", "9" * 30]),
    )
    | st.builds("[EfficientLLM Metrics] Iteration {}:".format, n)
    | st.builds("  {}".format, st.sampled_from(["Loss: 2", "AL (Seconds): 0.5", "AEC (Watts): 3"]))
    | st.builds(
        "iteration {}/ 40 | consumed samples: {} | elapsed time per iteration (ms): {} | "
        "lm loss: 2 |".format,
        n, n, n,
    )
    | st.builds("[rank{}] step: {} loss: 2 memory: 1.5GiB(3%) tps: {}".format, small, n, n)
    | st.builds("{}: step={} loss={}".format, small, n, small)
)  # fmt: skip
texts = (
    st.text(max_size=80)
    | st.lists(st.sampled_from(WORDS + DICT_WORDS), max_size=14).map("".join)
    | dicts
    | lines_of_programs
)
times = st.none() | st.integers(0, 5).map(lambda t: t * 100_000_000)


def check(records: list[Record]) -> None:
    assert len(marks(records, "several_programs")) <= 1
    for step in [*steps(records), *steps(records, "eval")]:
        assert step.window.duration_s > 0
        assert step.steps is None or step.steps > 0
        assert step.tokens_computed is None or step.tokens_computed >= 0


@given(st.lists(st.tuples(texts, times), max_size=12), st.sampled_from(IMPORTERS))
def test_no_text_raises_and_no_step_is_empty(
    timed: list[tuple[str, int | None]], importer: Importer
) -> None:
    importer.recognises([text for text, _ in timed])
    check(list(importer.records([Line(text, t_ns) for text, t_ns in timed])))


@given(
    st.lists(st.tuples(lines_of_programs, st.sampled_from([0, 1000, S // 10, S, 60 * S]))),
    st.sampled_from(IMPORTERS),
)
def test_of_a_mixture_of_programs_the_steps_of_training_never_overlap(
    timed: list[tuple[str, int]], importer: Importer
) -> None:
    t_ns, lines = 10 * 60 * S, []
    for text, wait_ns in timed:
        t_ns += wait_ns
        lines.append(Line(text, t_ns))
    records = list(importer.records(lines))
    check(records)
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(steps(records)))
    assert all(s.end_ns <= t_ns for s in steps(records))


ENDLESS = {
    "one that trains": "step={i} loss=2 tokens=64",
    "one that stands still": "step=5 loss=2 tokens=64",
    "epochs": "epoch={e} step={k} loss=2",
    "a total that stands still": "step={i} total_tokens=64",
    "a bar that stands still": " 5%|x | 3/40 [00:01<00:09, 9it/s, loss={i}]",
    "no number": "loss=2 tokens=64",
    "ranks": "step={i} loss=2 rank={i}",
    "dicts": "{{'loss': {i}, 'learning_rate': 1e-4, 'epoch': {i}, 'num_tokens': {i}}}",
    "dicts that stand still": "{{'loss': {i}, 'learning_rate': 1e-4, 'epoch': 1.5}}",
    "dicts that begin again": "{{'loss': {i}, 'learning_rate': 1e-4, 'epoch': {k}}}",
    "evaluations": "{{'eval_loss': 2, 'eval_runtime': 0.1, 'epoch': {k}}}",
    "plain lines": "step_time: 0.5",
    "plain lines of two figures": "loss: {i} throughput: 2",
    "bars of nxdt": "5%|x | 3/40 [00:01<00:09, reduced_train_loss=2, global_step={i}, lr=2]",
    "blocks": "[EfficientLLM Metrics] Iteration {i}:",
    "blocks of one line": "[EfficientLLM Metrics] Iteration {i}: | Loss: 2",
    "iterations": "iteration {i}/ 9 | elapsed time per iteration (ms): 5 | lm loss: 2 |",
    "iterations that begin again": "iteration {k}/ 9 | elapsed time per iteration (ms): 5 |",
    "torchtitan": "step: {i} loss: 2 memory: 1.5GiB(3%) tps: 5",
}
READERS: dict[str, Importer] = {
    "plain": NxdtImporter(), "bars of nxdt": NxdtImporter(), "blocks": EfficientLlmImporter(),
    "iterations": MegatronImporter(), "torchtitan": TorchTitanImporter(),
    "dicts": HfTrainerImporter(), "evaluations": HfTrainerImporter(),
}  # fmt: skip


ONCE = ("plain", "bars of", "blocks", "iterations", "torchtitan")
CASES = [(what, S) for what in ENDLESS]
CASES += [(what, 0) for what in ENDLESS if not what.startswith(ONCE)]


@pytest.mark.parametrize(("what", "gap_ns"), CASES)
def test_output_without_an_end_is_not_held_in_memory(what: str, gap_ns: int) -> None:
    readers = (reader for start, reader in READERS.items() if what.startswith(start))
    importer = next(readers, IMPORTERS[0])

    def lines(many: int) -> Iterator[Line]:
        for i in range(many):
            yield Line(ENDLESS[what].format(i=i, k=i % 50, e=i // 50), S + i * gap_ns)

    def peak_bytes(many: int) -> int:
        tracemalloc.start()
        try:
            for record in importer.records(lines(many)):
                del record
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(300)  # what is made once: patterns, caches
    # A line that is kept costs 200 bytes and more: these would be 240 kB and more.
    assert peak_bytes(1500) < peak_bytes(300) + 120_000


def test_a_line_of_any_length_and_junk_is_survived() -> None:
    junk = [
        "a" * 70_000,
        "step=" + "1" * 70_000,
        "{" * 70_000,
        "step=1 " * 9_000,
        "\x00\ufffd" * 99,
        "reduced_train_loss=" * 3_500,
        "reduced_train_loss=1, " + "a=" * 30_000,
        "step_time: " * 6_000,
        "elapsed time per iteration (ms): 1 | " * 1_700,
        "iteration " + " " * 60_000 + "elapsed time per iteration (ms):",
        "[EfficientLLM Metrics] Iteration 1:" + " " * 60_000,
        "step: 1 loss: memory: GiB( tps:" + "1," * 30_000,
        "global batch size " * 3_000,
        "steps: 1 loss: iter time (s):" * 2_000,
        "seq_length " + "." * 60_000,
        "2026-11-15 10:00:00" * 3_000,
        "[00:" * 15_000,
    ]
    for importer in IMPORTERS:
        for t_ns in (0, None):
            lines = [Line(text, t_ns) for text in junk]
            importer.recognises(junk)
            assert steps(list(importer.records(lines))) == []
