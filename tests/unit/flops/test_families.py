"""Every family against transformers' own model: its parameters, and torch's count of its FLOPs.

Models are built without values where they can be; where the code asks for values (which tokens
are an image, which expert was picked) they are small and real. Torch counts what eager attention
computes: the whole rectangle, whatever the mask.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from ergmeter.flops.analytic import step_flops, total
from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.families import DECODERS
from ergmeter.flops.families.encoders import ENCODERS, SEQ2SEQ
from ergmeter.flops.families.vision import IMAGES, LANGUAGE_ALONE, VISION
from ergmeter.flops.graph.graph import Attention, Linear
from ergmeter.flops.source import known_families, model_graph
from tests.unit.flops.family_cases import CASES, SCAN, TEXT, TWO, Case
from tests.unit.flops.live_storages import unpacked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ergmeter.flops.graph.graph import Graph, Node

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.frameworks]
torch = pytest.importorskip("torch")
flop_counter = pytest.importorskip("torch.utils.flop_counter")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

SEQ_LEN, SOURCE_LEN, BATCH = 64, 96, 2
SCANNED_LEN = 8  # the reference code walks a recurrence step by step


NAMES = sorted({*known_families(), *CASES} - set(LANGUAGE_ALONE))


@dataclass
class Built:
    """A family's graph beside transformers' model and what both are given."""

    graph: Graph
    model: Any
    batch: Batch
    inputs: dict[str, Any]


def _auto(kind: str) -> Any:
    if kind in VISION:
        return transformers.AutoModelForImageTextToText
    if kind in ("vit", "dinov2"):
        return transformers.AutoModelForImageClassification
    if kind in IMAGES:
        return transformers.AutoModel
    if kind == "whisper":
        return transformers.AutoModelForSpeechSeq2Seq
    if kind in SEQ2SEQ:
        return transformers.AutoModelForSeq2SeqLM
    if kind in ENCODERS:
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModelForCausalLM


@contextmanager
def _mode(case: Case) -> Iterator[None]:
    if case.is_real:
        yield
        return
    with unpacked(), torch.device("meta"):
        yield


def _built(name: str, case: Case) -> Built:
    kind = case.family or name
    changes = case.changes or ({} if kind in CASES else TWO)
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind](**changes)
    auto = _auto(kind)
    graph = model_graph(
        ModelConfig(config.to_dict(), where=name),
        image_size=case.image_size,
        architecture=auto._model_mapping[type(config)].__name__ if kind in IMAGES else None,
    )
    if graph.params != graph.params_active:  # torch does not count grouped products
        getattr(config, "text_config", config)._experts_implementation = "batched_mm"
    model = auto.from_config(config, attn_implementation="eager").eval()
    model.requires_grad_(requires_grad=True)  # fixed sines are parameters too
    batch, inputs = _inputs(kind, graph, case)
    return Built(graph, model, batch, inputs)


def _inputs(kind: str, graph: Graph, case: Case) -> tuple[Batch, dict[str, Any]]:
    if kind in VISION:
        return _image_inputs(kind, graph, case)
    length = SCANNED_LEN if case.linear_only == SCAN else SEQ_LEN
    rows = torch.randint(1, 100, (BATCH, length))
    facts = graph.facts
    if kind in IMAGES:
        return _pixel_inputs(graph, rows)
    if kind in ENCODERS:
        return Batch.of(BATCH, SEQ_LEN, facts=facts), {"input_ids": rows}
    if kind == "whisper":
        audio = torch.randn(BATCH, 80, 2 * facts["source_len"])
        return Batch.of(BATCH, SEQ_LEN, facts=facts), {
            "input_features": audio,
            "decoder_input_ids": rows,
        }
    if kind in SEQ2SEQ:
        source = torch.randint(1, 100, (BATCH, SOURCE_LEN))
        batch = Batch.of(BATCH, SEQ_LEN, source_len=SOURCE_LEN, facts=facts)
        return batch, {"input_ids": source, "decoder_input_ids": rows}
    return Batch.of(BATCH, length, facts=facts), {"input_ids": rows, "use_cache": False}


def _pixel_inputs(graph: Graph, rows: Any) -> tuple[Batch, dict[str, Any]]:
    """An image for each sequence, in place of a text or beside it."""
    facts = graph.facts
    if "grid_rows" not in facts:
        return Batch.of(BATCH, SEQ_LEN, facts=facts), {"input_ids": rows}
    patch = next(node.work.inputs for node in graph if isinstance(node.work, Linear))
    side = facts["grid_rows"] * round((patch / 3) ** 0.5)
    inputs = {"pixel_values": torch.randn(BATCH, 3, side, side)}
    if "image_is_sequence" in facts:
        return Batch.of(BATCH, facts["tokens_per_image"], facts=facts), inputs
    batch = Batch.of(BATCH, SEQ_LEN, images=BATCH, facts=facts)
    return batch, {**inputs, "input_ids": rows}


def _image_inputs(kind: str, graph: Graph, case: Case) -> tuple[Batch, dict[str, Any]]:
    """One image at the start of one sequence."""
    facts = graph.facts
    tokens = facts["tokens_per_image"]
    rows = torch.randint(1, 100, (1, tokens + 16))
    rows[0, 4 : 4 + tokens] = 199
    is_image = rows == 199
    high, wide = 7 * facts["grid_rows"], 7 * facts["grid_columns"]
    inputs: dict[str, Any] = {"input_ids": rows, "use_cache": False}
    inputs["pixel_values"] = torch.randn(1, 3, high, wide)
    if kind.startswith("qwen"):
        rows[0, 3] = 198
        inputs["pixel_values"] = torch.randn(high * wide // 49, 2 * 3 * 49)
        inputs["image_grid_thw"] = torch.tensor([[1, high // 7, wide // 7]])
        inputs["mm_token_type_ids"] = is_image.int()
    elif kind == "llava_next":
        inputs["pixel_values"] = torch.randn(1, facts["views_per_image"], 3, high, wide)
        inputs["image_sizes"] = torch.tensor([case.image_size])
    elif kind in ("idefics3", "smolvlm"):
        inputs["pixel_values"] = torch.randn(1, 1, 3, high, wide)
    elif kind == "mistral3" or case.image_size is not None:
        inputs["image_sizes"] = torch.tensor([[high, wide]])
    if kind in ("paligemma", "gemma3"):
        inputs["token_type_ids"] = is_image.long()
    return Batch.of(1, tokens + 16, images=1, facts=facts), inputs


def _result(output: Any) -> Any:
    """What a loss is made of."""
    names = ("logits", "logits_per_text", "pooler_output", "last_hidden_state")
    return next(output[name] for name in names if output.get(name) is not None)


def _counted(built: Built, *, linear_only: bool = False) -> tuple[float, float]:
    """Forward FLOPs and those of the whole step, as torch counts them."""
    with flop_counter.FlopCounterMode(display=False) as counter:
        logits = _result(built.model(**built.inputs))
        forward = dict(counter.get_flop_counts()["Global"])
        logits.float().sum().backward()
    step = counter.get_flop_counts()["Global"]
    aten = torch.ops.aten

    def of(counts: dict[Any, int]) -> float:
        return sum(n for op, n in counts.items() if not linear_only or op in (aten.mm, aten.addmm))

    return of(forward), of(step)


def _reckoned(
    built: Built,
    *,
    linear_only: bool = False,
    trainable: Callable[[Node], bool] = lambda _node: True,
) -> tuple[float, float]:
    parts = step_flops(built.graph, built.batch, trainable=trainable, pairs="computed")
    if linear_only:
        others = (
            "attention scores",
            "attention values",
            "convolution",
            "experts",
            "patches",
            "gates",
        )
        parts = {part: cost for part, cost in parts.items() if not part.endswith(others)}
    return total(parts).forward, total(parts).model


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_flops_are_those_of_transformers(name: str) -> None:
    case = CASES.get(name, Case())
    linear_only = bool(case.linear_only)
    with _mode(case):
        built = _built(name, case)
        held = sum(weight.numel() for weight in built.model.parameters())
        assert built.graph.params == held
        counted = _counted(built, linear_only=linear_only)
    assert _reckoned(built, linear_only=linear_only) == pytest.approx(counted, rel=1e-3)


_TOWER = ("vision_tower", "vision_model", "visual.blocks", "visual.patch", "visual.pos")


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if (case.family or name) in VISION]
)
def test_a_frozen_tower_has_no_way_back_and_the_projector_above_it_has(name: str) -> None:
    linear_only = bool(CASES[name].linear_only)
    built = _built(name, CASES[name])
    for key, weight in built.model.named_parameters():
        weight.requires_grad_(not any(word in key for word in _TOWER))
    tower = (*_TOWER, "visual.embeddings")

    def trainable(node: Node) -> bool:
        return not any(word in node.name for word in tower)

    reckoned = _reckoned(built, linear_only=linear_only, trainable=trainable)
    assert reckoned == pytest.approx(_counted(built, linear_only=linear_only), rel=1e-6)
    parts = step_flops(built.graph, built.batch, trainable=trainable)
    assert parts["vision mlp"].backward == 0 < parts["vision mlp"].forward
    assert parts["projector"].backward >= parts["projector"].forward > 0


def test_every_family_of_the_readers_is_known() -> None:
    assert set(known_families()) == {
        *DECODERS,
        *ENCODERS,
        *SEQ2SEQ,
        *VISION,
        *IMAGES,
        *LANGUAGE_ALONE,
    }


WINDOWED = [
    *("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3", "olmo3", "exaone4", "cohere2"),
    *("gemma2", "gemma3_text", "cwm", "ministral"),
]


@pytest.mark.parametrize("kind", WINDOWED)
def test_windows_that_are_not_listed_are_those_of_transformers(kind: str) -> None:
    fields = {**TEXT, "num_hidden_layers": 32, "head_dim": 16, "use_sliding_window": True}
    theirs = transformers.AutoConfig.for_model(kind, **fields, sliding_window=32).to_dict()
    # The mixture of Qwen 3 lists no layers: its window is every layer's.
    kinds = theirs.get("layer_types") or ["sliding_attention"] * 32
    unlisted = {name: value for name, value in theirs.items() if name != "layer_types"}
    graph = model_graph(ModelConfig(unlisted, where=kind))
    ours = [node.work.window for node in graph.nodes if isinstance(node.work, Attention)]
    assert ours == [32 if each == "sliding_attention" else None for each in kinds]
    assert 32 in ours


@pytest.mark.parametrize("kind", sorted(set(LANGUAGE_ALONE) - {"gemma3n"}))  # which wants timm
def test_a_language_model_without_its_towers_is_that_of_transformers(kind: str) -> None:
    small: dict[str, Any] = {"num_hidden_layers": 6}
    if kind != "phi4_multimodal":  # whose language model is not in a part of its own
        small = {"text_config": {**small, "model_type": LANGUAGE_ALONE[kind]}}
    if kind == "aya_vision":  # whose own default is no tower
        small["vision_config"] = {"model_type": "siglip_vision_model"}
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind](**small)
    with torch.device("meta"):
        model = transformers.AutoModelForMultimodalLM.from_config(config)
    mine = {id(weight): weight.numel() for weight in model.get_decoder().parameters()}
    mine |= {id(model.get_output_embeddings().weight): model.get_output_embeddings().weight.numel()}
    tower = ("embed_tokens_extend",)  # Phi's, which stands among its layers
    towers = {id(w) for name, w in model.named_parameters() if any(t in name for t in tower)}
    graph = model_graph(ModelConfig(config.to_dict(), where=kind))
    assert graph.params == sum(n for key, n in mine.items() if key not in towers)
    assert f"only the language model of {kind} is counted" in graph.assumptions[0]


def test_olmo_3_has_its_window_where_its_file_does_not_list_the_layers() -> None:
    """At 65,536 tokens a window of 4096 in three layers of four; all pairs were counted before."""
    fields = {"model_type": "olmo3", "vocab_size": 100278}  # OLMo 3 of 7B
    graph = model_graph(ModelConfig(fields, where="x"))
    windows = [node.work.window for node in graph.nodes if isinstance(node.work, Attention)]
    assert windows == [4096, 4096, 4096, None] * 8
    whole = model_graph(ModelConfig({**fields, "layer_types": ["full_attention"] * 32}, where="x"))
    batch = Batch.of(1, 65536)
    ours, wrong = (total(step_flops(one, batch)).model for one in (graph, whole))
    assert wrong / ours - 1 == pytest.approx(0.577, abs=0.0005)
