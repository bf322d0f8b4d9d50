"""`model.generate` on a real GPU: CUDA events against a loop that waits for the device."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from ergmeter import Meter, Reading

pytestmark = pytest.mark.device


def test_ttft_and_tpot_agree_with_a_loop_that_synchronises(tmp_path: Path) -> None:
    """A prefill long enough that the host is far ahead of it: a host clock would be early."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from ergmeter.integrations.generate import measure

    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=4096, intermediate_size=11008, num_hidden_layers=8,
        num_attention_heads=32, pad_token_id=0,
    )  # fmt: skip
    with torch.device("cuda"):
        model: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
        ids = torch.randint(1, 1024, (8, 4096))
    tokens = 32
    call = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
    bare = type(model).generate

    def timed(count: int) -> float:
        torch.cuda.synchronize()
        before_s = time.perf_counter()
        bare(model, ids, max_new_tokens=count, **call)
        torch.cuda.synchronize()
        return time.perf_counter() - before_s

    hand = []
    with Meter(tmp_path / "run", probes=[]) as meter, measure(model, meter):
        for number in range(9):
            if number == 2:
                meter.mark("warmup_end")
            hand.append((timed(1), timed(tokens)))
            torch.cuda.synchronize()
            model.generate(ids, max_new_tokens=tokens, **call)
    first_s = statistics.median(first for first, _ in hand[2:])
    each_s = statistics.median((whole - first) / (tokens - 1) for first, whole in hand[2:])
    readings = meter.summary().readings
    for key, expected in (("latency.ttft_median_s", first_s), ("latency.tpot_median_s", each_s)):
        found = readings[key]
        assert isinstance(found, Reading), found
        assert found.value == pytest.approx(expected, rel=0.05)
    found = readings["latency.ttft_median_s"]
    assert isinstance(found, Reading)
    assert "CUDA events" in found.note
