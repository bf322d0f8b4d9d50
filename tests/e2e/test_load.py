"""`erg load` as a user runs it: against `transformers serve`, on a terminal, and interrupted."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.conftest import ERG, TIMEOUT_S, environment, eventually
from tests.ports import free_port
from tests.scripted_server import Script, serving

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

WORDS = ("<pad>", "<s>", "</s>", "<unk>", "user", "assistant", ":", "red", "green", "blue", "grey")
TEMPLATE = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}assistant :"
TEMPLATE_TOKENS = 4  # user : ... assistant :
GENERATED = 8


@dataclass
class Served:
    url: str
    model: str


def save_model(path: Path) -> None:
    """A Llama of two layers with random weights, and a tokenizer that takes a token for a word."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped: Any = PreTrainedTokenizerFast
    tokenizer = wrapped(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        pad_token="<pad>",
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    made: Any = LlamaForCausalLM
    model = made(
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        )
    )  # fmt: skip
    model.generation_config.eos_token_id = None  # so that every answer has its full length
    model.generation_config.suppress_tokens = [0, 1, 2, 3]  # which have no text
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`transformers serve` of that model, as a process of its own."""
    pytest.importorskip("transformers", minversion="5.0")
    pytest.importorskip("fastapi")
    pytest.importorskip("tokenizers")
    root = tmp_path_factory.mktemp("served")
    save_model(root / "model")
    port = free_port()
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(root / "model"),
               "--port", str(port), "--device", "cpu"]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    offline = environment(HF_HUB_OFFLINE="1", HF_HOME=str(root / "home"))
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1"], env=offline, stdout=log, stderr=log, cwd=root
        )
        try:
            eventually(lambda: process.poll() is not None or is_up(url), "transformers serve")
            assert process.poll() is None, (root / "log").read_text()
            yield Served(url, str(root / "model"))
        finally:
            process.kill()
            process.wait()


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_a_real_server_at_several_numbers_at_a_time(lab: Lab, served: Served) -> None:
    lengths = [3, 5, 9, 4]
    prompts = [{"prompt": " ".join(["red"] * length)} for length in lengths]
    (lab.path / "p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    done = lab.run(
        ERG, "load", served.url, "--model", served.model, "--concurrency", "1,2,4",
        "--requests", 12, "--warmup", 4, "--prompts", "p.jsonl", "--output-tokens", GENERATED,
        "--out", "runs", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    whole = json.loads(done.stdout)
    assert whole["tokens_from"] == "usage"
    assert [level["most_in_flight"] for level in whole["levels"]] == [1, 2, 4]
    for at_once, level in zip((1, 2, 4), whole["levels"], strict=True):
        assert (level["answered"], level["failed"]) == (12, 0)
        report = lab.report(f"runs/c{at_once}")["readings"]
        assert report["requests.count"]["value"] == 12
        # 12 requests are three times round the file; a word is a token, the template has four.
        prompt_tokens = 3 * sum(length + TEMPLATE_TOKENS for length in lengths)
        assert report["requests.prompt_tokens"]["value"] * 12 == pytest.approx(prompt_tokens)
        assert report["requests.generated_tokens"]["value"] == GENERATED
        assert report["tokens.total"]["value"] == prompt_tokens + 12 * GENERATED
        window_s = report["time.window_s"]["value"]
        out = report["throughput.output_tokens_per_s"]
        assert out["value"] == pytest.approx(12 * GENERATED / window_s)
        assert out["basis"] == "measured"
        # At most, and not less: on a busy machine so short an answer may come in one piece.
        whole_s = report["latency.e2e_median_s"]["value"]
        assert 0 < report["latency.ttft_median_s"]["value"] <= whole_s
        assert 0 <= report["latency.tpot_median_s"]["value"] * (GENERATED - 1) <= whole_s
        generated = report["throughput.generated_tokens_per_s"]
        if "missing" in generated:  # where answers came in one piece
            assert re.search("no decode spans|decode spans of 0 s", generated["missing"])
        else:
            assert generated["value"] >= out["value"]


def test_made_up_prompts_get_the_length_that_was_asked_for(lab: Lab, served: Served) -> None:
    done = lab.run(
        ERG, "load", served.url, "--model", served.model, "--requests", 3, "--prompt-tokens", 40,
        "--output-tokens", 4, "--endpoint", "completions", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    (level,) = json.loads(done.stdout)["levels"]
    assert level["readings"]["requests.prompt_tokens"]["value"] == 40
    assert level["readings"]["requests.generated_tokens"]["value"] == 4


def test_ctrl_c_shows_what_was_answered_until_then(lab: Lab) -> None:
    with serving(Script(ttft_s=0.01)) as server:
        process = lab.start(
            ERG, "load", server.url, "--model", "m", "--duration", 60, "--warmup", 0,
            "--concurrency", "2,4", "--out", "runs", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        eventually(lambda: len(server.bodies) > 20, "some requests")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert err == b""
    assert b"2 at a time" in out
    assert b"4 at a time" not in out
    readings = lab.report("runs/c2")["readings"]
    assert readings["requests.count"]["value"] >= 15
    assert readings["requests.failed"]["value"] == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_still_prints_the_json_and_counts_what_was_in_flight(
    lab: Lab, number: signal.Signals, code: int
) -> None:
    """After ten answers the server is silent, so four requests are in flight."""
    good = Script(ttft_s=0.0)
    end = threading.Event()

    def script(asked: int, body: dict[str, Any], send: Callable[[bytes], None]) -> None:
        if asked < 13:  # three trials
            good(asked, body, send)
        else:
            end.wait(TIMEOUT_S)

    with serving(script) as server:
        process = lab.start(
            ERG, "load", server.url, "--model", "m", "--duration", 60, "--warmup", 0, "--slo",
            "ttft=9", "--concurrency", 4, "--out", "run", "--json", stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        eventually(lambda: len(server.bodies) == 17, "four requests in flight")
        process.send_signal(number)
        out, err = process.communicate(timeout=TIMEOUT_S)
        end.set()
    assert err == b""
    assert process.returncode == code
    whole = json.loads(out)
    (level,) = whole["levels"]
    assert (level["offered"], level["answered"], level["failed"], level["unsettled"]) == (
        14, 10, 0, 4)  # fmt: skip
    assert level["readings"]["requests.slo_attainment_frac"]["value"] == pytest.approx(10 / 14)
    assert any("4 requests in flight when it was interrupted" in one for one in whole["remarks"])
    lines = [json.loads(x) for x in (lab.path / "run" / "requests.jsonl").read_text().splitlines()]
    ends = [line["end_ns"] for line in lines]
    assert ends.count(None) == 4
    window_s = (max(filter(None, ends)) - min(line["due_ns"] for line in lines)) / 1e9
    assert level["readings"]["throughput.requests_per_s"]["value"] == pytest.approx(10 / window_s)


def test_a_signal_in_the_warm_up_leaves_nothing_that_counts(lab: Lab) -> None:
    with serving(Script(ttft_s=0.05)) as server:
        process = lab.start(
            ERG, "load", server.url, "--model", "m", "--warmup", 1000, "--out", "run", "--json",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        eventually(lambda: len(server.bodies) > 8, "some of the warm-up")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert err == b""
    assert process.returncode == 143
    (level,) = json.loads(out)["levels"]
    assert (level["offered"], level["answered"], level["unsettled"]) == (0, 0, 0)
    missing = level["readings"]["throughput.requests_per_s"]["missing"]
    assert missing.startswith("no request after the warm-up")


def test_a_terminal_shows_how_far_it_is_and_then_the_table(lab: Lab) -> None:
    with serving(Script(ttft_s=0.05)) as server:
        terminal = lab.terminal(
            ERG, "load", server.url, "--model", "m", "--requests", 20, "--out", "run"
        )
        shown = terminal.read_all().decode()
    assert "requests" in shown
    assert "━" in shown
    table = shown.rpartition("\x1b[2K")[2]
    assert "1 at a time" in table
    assert "…" not in table  # it fits 80 columns
    assert "erg report run" in table
