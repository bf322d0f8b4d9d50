"""`erg estimate`: the table, the verdict, the JSON, and how misuse is answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ergmeter.cli.main import main
from ergmeter.records import Flops
from tests.runs import add_writer, even_steps, make_run

Answer = tuple[int, str, str]
Erg = Callable[..., Answer]
MODEL = "hidden=2048,layers=22,ffn=5632,heads=32,kv_heads=4,vocab=32000"
SMALL = MODEL.replace("layers=22", "layers=2")  # for what is not about its size
BATCH = ("--seq-len", "2048", "--batch-size", "8")
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
LORA = ("--lora", "r=16,targets=q_proj,k_proj,v_proj,o_proj")


@pytest.fixture
def erg(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Erg:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ERGMETER_HARDWARE", raising=False)

    def call(*arguments: str) -> Answer:
        with pytest.raises(SystemExit) as ended:
            main(["estimate", *arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


# How those peaks were recorded: a function held the model's output through the backward pass.
RECORDED = ("--optimizer", "adamw", "--output", "until-step", "--kv-cache")


def document(erg: Erg, *arguments: str, model: str = MODEL) -> dict[str, Any]:
    code, out, err = erg(model, *BATCH, *arguments, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ((), 45_705_421_312),
        (LORA, 43_024_355_328),
        ((*LORA, "--quantize", "nf4"), 41_814_885_376),
    ],
    ids=["full", "lora", "qlora"],
)
def test_the_recorded_peaks_of_an_h200(erg: Erg, options: tuple[str, ...], recorded: int) -> None:
    found = document(erg, "--device", "NVIDIA H200", *RECORDED, *options)
    peak = found["readings"]["estimate.memory_peak_bytes"]
    assert peak["basis"] == "assumed"
    assert peak["value"] == pytest.approx(recorded, rel=0.01)
    assert found["verdict"].startswith("fits with ")


def test_what_the_program_decides_is_assumed_and_said(erg: Erg) -> None:
    plain = document(erg)
    held = document(erg, "--output", "until-next")
    foreach = document(erg, "--optimizer", "adamw")
    cached = document(erg, "--kv-cache")
    logits, params = 8 * 2048 * 32000 * 2, 1_100_048_384

    def step(found: dict[str, Any]) -> dict[str, float]:
        moment: dict[str, float] = found["moments"]["optimizer step"]
        return moment

    assert step(held)["output"] == logits
    assert step(plain)["output"] == step(plain)["working"] == 0
    assert step(foreach)["working"] == 2 * params
    assert held["readings"]["estimate.memory_output_bytes"]["value"] == logits
    said = {name: " | ".join(found["assumptions"]) for name, found in (
        ("plain", plain), ("held", held), ("foreach", foreach), ("cached", cached)
    )}  # fmt: skip
    assert "output is freed before the backward pass, as in transformers' Trainer" in said["plain"]
    assert "holds 1.049 GB more: --output until-next" in said["plain"]
    assert "foreach AdamW, takes 2.2 GB more" in said["plain"]
    assert "output, 1.049 GB, is held until the next forward pass" in said["held"]
    assert "takes 2.2 GB more" not in said["foreach"]
    assert "no cache of keys and values" in said["plain"]
    assert "copies keys and values into a cache" in said["cached"]


def test_every_reading_is_labelled_as_assumed(erg: Erg) -> None:
    found = document(
        erg,
        *("--device", "h200-sxm5", "--tokens", "1e9", "--mfu", "0.45", "--power-frac", "0.9"),
        *("--grid-g-per-kwh", "300", "--pue", "1.2", "--price-per-hour", "3", "--currency", "USD"),
        model=SMALL,
    )
    readings = found["readings"]
    assert {one["basis"] for one in readings.values()} == {"assumed"}
    hours = readings["estimate.duration_h"]["value"]
    assert readings["estimate.cost"]["value"] == pytest.approx(3 * hours)
    assert readings["estimate.energy_kwh"]["value"] == pytest.approx(0.63 * hours)
    assert readings["estimate.co2e_g"]["value"] == pytest.approx(0.63 * hours * 300 * 1.2)
    assert any("transformers" in line for line in found["assumptions"])


def test_what_was_not_stated_is_missing_with_the_option_it_waits_for(erg: Erg) -> None:
    readings = document(erg)["readings"]
    assert "--mfu" in readings["estimate.step_s"]["missing"]
    assert "--device" in readings["estimate.memory_spare_bytes"]["missing"]


def test_the_table_shows_moments_verdict_and_what_to_change(erg: Erg) -> None:
    code, out, _ = erg(MODEL, *BATCH, "--device", "a100-sxm4-40gb", *RECORDED)
    assert code == 0
    assert "through the loss" in out
    assert "optimizer step" in out
    assert "does not fit: needs 45.7 GB, has 38.65 GB, 90 % of 42.95 GB" in out
    rows = {line.strip(): line.split() for line in out.splitlines() if line.strip()}
    asked = next(row for line, row in rows.items() if line.startswith("as asked"))
    assert asked[2:] == ["45.7", "GB", "too", "much", "6"]
    full = next(row for line, row in rows.items() if line.startswith("--checkpointing full"))
    assert full[2:5] == ["15.75", "GB", "fits"]
    assert "bf16: weights 2 B, products in 2 B, no master copy" in out
    assert "optimizer adamw: torch's AdamW as it is by default on CUDA (foreach)" in " ".join(
        out.split()
    )
    freed = next(row for line, row in rows.items() if line.startswith("--output freed"))
    assert freed[2:4] == ["44.65", "GB"]  # 8 x 2048 x 32000 logits of 2 B less


@pytest.mark.parametrize(
    ("device", "mib", "said"),
    [
        ("NVIDIA L4", 23034, "NVIDIA L4, by nvidia-smi with ECC on, as it ships"),
        ("NVIDIA A40", 46068, "NVIDIA A40, by nvidia-smi with ECC on, as it ships"),
        (
            "NVIDIA RTX A6000",
            49140,
            "NVIDIA RTX A6000 (Ampere), by nvidia-smi with ECC off, as it ships",
        ),
        ("h100 80gb", 81559, "any of h100-sxm, h100-pcie, by nvidia-smi"),  # which agree
        ("rtx-2080-ti", 11264, "nominal; a driver can report some 6 % less"),
    ],
)
def test_the_room_is_what_the_driver_reports_where_that_is_known(
    erg: Erg, device: str, mib: int, said: str
) -> None:
    readings = document(erg, "--device", device, model=SMALL)["readings"]
    spare, peak = (readings[f"estimate.memory_{name}_bytes"] for name in ("spare", "peak"))
    assert spare["value"] == pytest.approx(0.9 * mib * 2**20 - peak["value"])
    assert said in spare["note"]


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("H100", "'H100' is any of h100-sxm, h100-pcie, h100-nvl, and their memory differs: name"),
        ("4090", "pass --device or --memory-gib (no row of the hardware table is named '4090'"),
    ],
)
def test_a_device_without_a_memory_is_answered_with_the_option_for_it(
    erg: Erg, device: str, said: str
) -> None:
    found = document(erg, "--device", device, "--mfu", "0.4", model=SMALL)
    assert said in found["verdict"]
    assert "--peak" not in found["verdict"]
    assert "--memory-gib" in found["verdict"]
    assert "unknown peak: pass --peak (" in found["readings"]["estimate.step_s"]["missing"]
    found = document(erg, "--device", device, "--memory-gib", "80", model=SMALL)
    assert found["fits"] is True


def test_a_source_is_named_without_its_address(erg: Erg) -> None:
    arguments = ("--device", "a100", "--memory-gib", "40", "--mfu", "0.4", "--tokens", "1e9")
    code, out, _ = erg(SMALL, *BATCH, *arguments)
    assert (code, "http" in out) == (0, False)
    rows = "a100-sxm-40gb, a100-sxm-80gb, a100-pcie-40gb, a100-pcie-80gb"
    said = f"(NVIDIA A100 datasheet, checked 2026-11-15; a100 is any of {rows}, which agree on it)"
    assert " ".join(out.split()).count(said) == 1


@pytest.mark.parametrize(("window", "is_said"), [("", False), (",window=512", True)])
def test_the_mask_of_a_window_is_spoken_of_where_there_is_one(
    erg: Erg, window: str, is_said: bool
) -> None:
    _, out, _ = erg(f"{MODEL}{window}", *BATCH)
    words = " ".join(out.split())
    assert "torch's sdpa for attention, which keeps no probabilities" in words
    assert ("; layers with a window shorter than the sequence keep its mask" in words) is is_said


def test_what_waits_for_one_option_is_one_line(erg: Erg) -> None:
    _, out, _ = erg(SMALL, *BATCH, "--device", "h200-sxm5")
    names = ("step_s", "tokens_per_s", "duration_h", "energy_kwh", "co2e_g", "cost")
    said = ", ".join(f"estimate.{name}" for name in names) + " - no utilisation was given"
    assert out.count("no utilisation was given") == 1
    assert said in " ".join(out.split())


@pytest.mark.parametrize(
    "options",
    [
        (),
        LORA,
        (*LORA, "--quantize", "nf4"),
        ("--inference",),
        ("--num-devices", "2", "--tensor-parallel", "2"),
    ],
    ids=" ".join,
)
def test_a_terminal_of_80_columns_is_wide_enough(
    erg: Erg, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = erg(MODEL, *BATCH, "--device", "NVIDIA H200", *options)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "that fits" in out  # the last column, whole
    assert " GB  fits " in out


def test_the_changes_are_in_the_document(erg: Erg) -> None:
    found = document(erg, "--device", "a100-sxm4-40gb", *RECORDED)
    assert found["fits"] is False
    changes = {each["with"]: each for each in found["ways"]}
    assert changes["as asked"]["micro_batch_max"] == 6
    assert changes["--checkpointing full"]["fits"] is True
    assert changes["--checkpointing full"]["peak_bytes"] == pytest.approx(15_754_049_536, rel=0.01)
    readings = found["readings"]
    assert readings["estimate.micro_batch_max"]["value"] == 6
    assert (found["params"], found["params_trained"]) == (1_100_048_384, 1_100_048_384)


def test_serving_has_weights_and_caches(erg: Erg) -> None:
    found = document(erg, "--inference", "--device", "h200-sxm5", "--weights-dtype", "fp8")
    held = found["serving"]
    assert held["cache_bytes_per_sequence"] == 22 * 2 * 4 * 64 * 2 * 2048
    tables = 2 * 32000 * 2048 + 45 * 2048  # which stay in 16 bits
    assert held["weights_bytes"] == 1_100_048_384 + tables
    peak = found["readings"]["estimate.memory_peak_bytes"]["value"]
    assert peak == held["weights_bytes"] + 8 * held["cache_bytes_per_sequence"]
    assert found["fits"] is True
    most = found["readings"]["estimate.sequences_max"]["value"]
    room = 0.9 * 143771 * 2**20  # what nvidia-smi says of an H200, of 141 GiB
    assert most == (room - held["weights_bytes"]) // held["cache_bytes_per_sequence"]
    code, out, _ = erg(MODEL, *BATCH, "--inference", "--memory-gib", "2")
    assert code == 0
    assert "cache of 8 x 2048 tokens" in out
    assert "the weights alone need 2.2 GB, more than" in out
    assert "--weights-dtype int4" in out


def test_without_a_cache_no_number_of_sequences_is_named(erg: Erg, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BERT))
    options = ("--seq-len", "128", "--inference", "--memory-gib", "8")
    code, out, _ = erg(str(path), *options)
    assert code == 0
    asked = next(line.split() for line in out.splitlines() if line.strip().startswith("as asked"))
    assert asked[-2:] == ["fits", "-"]
    assert "a sequence needs no cache, so memory" in out


def test_experts_that_bitsandbytes_would_leave_alone_are_spoken_of(erg: Erg) -> None:
    config = str(Path(__file__).parents[1] / "data" / "configs" / "mixtral-8x7b.json")
    options = ("--seq-len", "128", "--inference", "--json", "--weights-dtype")
    lines = {
        kept: [line for line in json.loads(erg(config, *options, kept)[1])["assumptions"]
               if "bitsandbytes" in line]
        for kept in ("nf4", "int4")
    }  # fmt: skip
    experts = 32 * 8 * 3 * 4096 * 14336
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    rest = 32 * 8 * 4096 + 65 * 4096 + 2 * 32000 * 4096
    left_alone_gb = (2 * (experts + rest) + 4.5 / 8 * attention) / 1e9
    assert lines["nf4"] == [
        "experts are counted in nf4 too; bitsandbytes does not quantise experts that transformers 5"
        f" stores as one tensor: with it, weights are {left_alone_gb:.2f} GB a device"
    ]
    assert not lines["int4"]


@pytest.mark.parametrize(
    ("memory_gib", "suggested"),
    [
        ("2.5", "--num-devices 8 --zero 3 --checkpointing full"),
        ("2", "--num-devices 16 --zero 3 --checkpointing full --batch-size 16"),
    ],
)
def test_the_devices_suggested_can_be_asked_for(erg: Erg, memory_gib: str, suggested: str) -> None:
    options = ("--memory-gib", memory_gib, "--usable", "1")
    way = document(erg, *options)["ways"][-1]
    assert way["with"] == suggested
    again = document(erg, *options, *suggested.split())
    assert again["fits"] is True
    assert again["readings"]["estimate.memory_peak_bytes"]["value"] == way["peak_bytes"]


def test_experts_may_have_adapters_and_what_is_done_is_said(erg: Erg) -> None:
    config = str(Path(__file__).parents[1] / "data" / "configs" / "qwen3-30b-a3b.json")
    options = ("--seq-len", "512", "--lora", "r=8,targets=all-linear", "--json")
    code, out, err = erg(config, *options)
    assert (code, err) == (0, "")
    assert any("adapters on experts" in line for line in json.loads(out)["assumptions"])
    code, _, err = erg(config, "--seq-len", "512", "--lora", "r=8,targets=gate_proj")
    assert code == 2
    assert "target both, or experts.gate_up_proj" in err


def test_devices_follow_from_the_sizes_or_must_agree_with_them(erg: Erg) -> None:
    spread = document(erg, "--num-devices", "8", "--tensor-parallel", "2", "--zero", "3")
    assert spread["sequences_per_device"] == 2
    assert spread["moments"]["optimizer step"]["weights"] < 2 * 1.2e9 / 8
    code, _, err = erg(MODEL, *BATCH, "--num-devices", "8", "--data-parallel", "3")
    assert code == 2
    assert "3 devices, and --num-devices is 8" in err
    code, _, err = erg(MODEL, *BATCH, "--num-devices", "8", "--tensor-parallel", "3")
    assert code == 2
    assert "8 devices are not a multiple of 3" in err


def test_memory_and_peak_may_be_given_instead_of_a_device(erg: Erg) -> None:
    found = document(erg, "--memory-gib", "32", "--usable", "1", "--peak", "400T", "--mfu", "0.5")
    assert found["verdict"].startswith("does not fit")
    step = found["readings"]["estimate.step_s"]
    assert step["value"] == pytest.approx(110.8e12 / (0.5 * 400e12), rel=1e-3)


def test_a_peak_beside_a_device_is_used_and_the_note_says_so(erg: Erg) -> None:
    given = ("--device", "h100-sxm", "--peak", "400T", "--mfu", "0.5")
    found = document(erg, *given)
    step = found["readings"]["estimate.step_s"]
    assert step["value"] == pytest.approx(110.8e12 / (0.5 * 400e12), rel=1e-3)
    assert (
        "400 TFLOP/s dense bf16 (given, source not stated; of NVIDIA H100 SXM5 80GB only memory and"
        " TDP are taken, not its 98"
    ) in step["note"]
    assert "NVIDIA H100 SXM5 80GB" in found["verdict"]


@pytest.mark.parametrize(
    ("stored", "options", "said"),
    [
        ({"quant_method": "mxfp4"}, (), "(mxfp4) is ignored: weights counted at 2 B; pass"),
        ({"quant_method": "fp8"}, ("--dtype", "fp32"), "(fp8) is ignored: weights counted at 4"),
        ({"load_in_4bit": True}, LORA, "(bitsandbytes) is ignored: weights counted at 2"),
        ({"quant_method": "gptq", "bits": 4}, (), "(gptq) is ignored"),
        ({"fmt": "e4m3"}, (), "(no method named) is ignored"),
        (
            {"quant_method": "fp8"},
            (*LORA, "--quantize", "nf4"),
            "(fp8) is ignored: matrices counted as --quantize nf4",
        ),
        (None, (), None),
    ],
)
def test_a_quantised_checkpoint_is_not_passed_over_in_silence(
    erg: Erg, tmp_path: Path, stored: object, options: tuple[str, ...], said: str | None
) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 176,
        "num_attention_heads": 4,
        "vocab_size": 500,
        "quantization_config": stored,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    code, out, err = erg(str(path), "--seq-len", "128", *options, "--json")
    assert (code, err) == (0, "")
    lines = [line for line in json.loads(out)["assumptions"] if "quantization_config" in line]
    assert len(lines) == (said is not None)
    assert all(said in line for line in lines if said is not None)
    path.write_text(json.dumps({**config, "quantization_config": "odd"}))
    code, _, err = erg(str(path), "--seq-len", "128")
    assert (code, "quantization_config must be an object; got 'odd'" in err) == (1, True)


def test_a_device_may_have_any_name(erg: Erg) -> None:
    code, out, _ = erg(MODEL, *BATCH, "--device", "[/b]")
    assert code == 0
    assert "[/b]" in out


def test_paged_states_are_on_the_host(erg: Erg) -> None:
    found = document(erg, "--optimizer", "paged-adamw")
    assert found["host_bytes"] == 8 * 1_100_048_384
    code, out, _ = erg(MODEL, *BATCH, "--optimizer", "paged-adamw")
    assert code == 0
    assert "8.8 GB of optimizer in memory that is paged to the host" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--quantize", "nf4"), "add adapters with --lora"),
        (("--optimizer", "adamz"), "no optimizer 'adamz'"),
        (("--mfu", "45"), "as in 0.4"),
        (("--micro-batches", "3"), "must be a multiple"),
        *(
            ((f"--{name}", value), f"--{name} is")
            for name in (
                "memory-gib",
                "usable",
                "tokens",
                "mfu",
                "watts",
                "power-frac",
                "grid-g-per-kwh",
                "pue",
                "price-per-hour",
            )
            for value in ("nan", "inf", "-1")
        ),
        (("--tensor-parallel", "64"), "32 attention heads can't be split evenly over 64"),
        (("--context-parallel", "5000"), "sequences of 2048 tokens can't be split over 5000"),
        (("--pipeline-parallel", "23"), "22 layers can't be split into 23 pipeline stages"),
        (("--freeze", "model", "--freeze", "lm_head"), "nothing is trained"),
        (("--batch-size", "9" * 400), "at most 1e+15 tokens"),
        (("--num-devices", "9" * 400), "not in the range"),
        (("--phase", "decode"), "No such option"),
        (("--weights-dtype", "fp8"), "--weights-dtype is for --inference"),
        (("--inference", "--quantize", "nf4"), "--quantize is not for --inference; use --weights"),
        (("--inference", "--dtype", "fp32"), "--dtype is not for --inference; use --weights-dtype"),
        *(
            (("--inference", f"--{name}", value), f"--{name} is not for --inference; leave it out")
            for name, value in (
                ("checkpointing", "full"),
                ("lora", "r=8,targets=q_proj"),
                ("freeze", "model"),
                ("context-parallel", "2"),
                ("zero", "3"),
                ("micro-batches", "1"),  # the default, given all the same
                ("attention", "eager"),
                ("optimizer", "sgd"),
                ("lengths", "2048"),
                ("mfu", "0.4"),
            )
        ),
        (("--inference", "--weights-dtype", "fp7"), "no type 'fp7' for stored numbers"),
        (("--inference", "--num-devices", "3"), "must be a multiple of the 3 model copies"),
        (("--inference", "--tensor-parallel", "64"), "can't be split evenly over 64"),
    ],
)
def test_misuse_is_one_line_and_code_2(erg: Erg, options: tuple[str, ...], said: str) -> None:
    code, out, err = erg(MODEL, *BATCH, *options)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_an_unknown_device_gets_its_memory_estimated_all_the_same(erg: Erg) -> None:
    found = document(erg, "--device", "abacus", "--mfu", "0.4")
    assert found["readings"]["estimate.memory_peak_bytes"]["value"] > 4e10
    assert "no row" in found["readings"]["estimate.step_s"]["missing"]
    assert "whether it fits is unknown" in found["verdict"]


def test_the_mfu_of_an_earlier_run_can_be_taken(erg: Erg, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", name="before")
    flops = Flops(2e12, "exact", "analytic", tokens_per_step=100)
    add_writer(
        run,
        steps=even_steps(20, tokens_computed=100),
        settings={"peak_flops_per_s": 4e12},
        header={"flops": [asdict(flops)]},
    )
    common = ("--device", "h200-sxm5", "--tokens", "1e9")
    stated, measured = (
        document(erg, *common, *told, model=SMALL)["readings"]["estimate.step_s"]
        for told in (("--mfu", "0.5"), ("--mfu-from", str(run)))
    )
    assert measured["value"] == pytest.approx(stated["value"])
    assert "of the run before" in measured["note"]
    code, _, err = erg(MODEL, *BATCH, *common, "--mfu-from", str(run), "--mfu", "0.5")
    assert code == 2
    assert "not both" in err
    add_writer(make_run(tmp_path / "bare"), steps=even_steps(20, tokens_computed=100))
    code, _, err = erg(MODEL, *BATCH, *common, "--mfu-from", str(tmp_path / "bare"))
    assert code == 1
    assert "has no MFU" in err
