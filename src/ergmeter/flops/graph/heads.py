"""Replaces the head on top of a model's layers: language model, classifier, or none.

The configurations of `LlamaForCausalLM` and `LlamaForSequenceClassification` have the same sizes,
but a language-model head can be more than half of a small model's FLOPs. So the model's class
decides: that of a live model, or `architectures` in a config.json. The head of a class comes from
transformers' own mappings (`config.head_of`); its name is used only if no mapping lists it.
"""

from __future__ import annotations

from dataclasses import replace

from ergmeter.flops.config import ModelConfig, head_of
from ergmeter.flops.graph.graph import Builder, Graph, Node

# The head of a class that is not in transformers' mappings, by how its name ends. Not "Model":
# MarianMTModel and ChatGLMModel have a head, MarianModel has none.
_ENDINGS = {
    **dict.fromkeys(
        ("ForCausalLM", "LMHeadModel", "LMHead", "ForMaskedLM", "DoubleHeadsModel",
         "ForConditionalGeneration", "ForSeq2SeqLM", "ForImageTextToText", "ForSpeechSeq2Seq"),
        "language",
    ),
    "ForSequenceClassification": "sequence classification",
    "ForTokenClassification": "token classification",
    "ForQuestionAnswering": "question answering",
}  # fmt: skip

# Matrices between an encoder's last layer and its classifier, as transformers builds them. They
# compute one row per sequence.
_POOLED = {
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "electra"), "classifier.dense"),
    **dict.fromkeys(("mpnet", "esm", "data2vec-text"), "classifier.dense"),
    "bert": "bert.pooler.dense",
    "distilbert": "pre_classifier",
    "modernbert": "head.dense",
    "deberta-v2": "pooler.dense",
    "albert": "albert.pooler",
    "ernie": "ernie.pooler.dense",
}
_BARE_POOLERS = {  # encoders whose class without a head has a pooler
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), "roberta.pooler.dense"),
    **{name: f"{name}.pooler.dense" for name in ("bert", "mpnet", "esm", "ernie")},
    "albert": "albert.pooler",
    "data2vec-text": "data2vec_text.pooler.dense",
}


def with_head(graph: Graph, config: ModelConfig, architecture: str | None) -> Graph:
    """Return the graph with the head of the class `architecture` instead of its own."""
    name = architecture or ""
    # From transformers' mappings, else by the ending of the name.
    by_ending = (head for ending, head in _ENDINGS.items() if name.endswith(ending))
    head = head_of(name) or next(by_ending, None)
    if not name or head == "language":
        return graph
    if head == "pretraining":
        return _pretraining(graph)
    if head == "encoder":
        return _reader_alone(graph)
    if head == "bare":
        return _bare(graph)
    has_source = any(node.stream == "source" for node in graph)
    if head is not None and not has_source:
        return _classifying(graph, config, head)
    instead = (
        "as an encoder-decoder with its own head" if has_source else "with a language-model head"
    )
    line = f"the class {name} is not known: counted {instead}"
    return replace(graph, assumptions=(*graph.assumptions, line))


def _headless(graph: Graph) -> list[Node]:
    return [node for node in graph if node.stream != "logits"]


def _reader_alone(graph: Graph) -> Graph:
    """Return the graph of an encoder-decoder's encoder, with the embedding that both share."""
    read = tuple(node for node in graph if node.part.startswith("encoder "))
    shared = {node.tied_to for node in read}
    shared_nodes = tuple(node for node in graph if node.name in shared)
    return replace(graph, nodes=(*shared_nodes, *read))


def _bare(graph: Graph) -> Graph:
    b, hidden = Builder(_headless(graph), stream="pooled"), graph.hidden
    pooler = _BARE_POOLERS.get(graph.family)
    if pooler is not None:
        b.linear(pooler, "head", b.nodes[-1].name, hidden, hidden, bias=True)
    return replace(graph, nodes=tuple(b.nodes))


def _pretraining(graph: Graph) -> Graph:
    """ELECTRA: a replaced-token head. BERT, ERNIE, ALBERT: also a pooler and a 2-class head."""
    hidden = graph.hidden
    if graph.family == "electra":
        b, name = Builder(_headless(graph)), "discriminator_predictions.dense"
        out = b.linear(name, "head", b.nodes[-1].name, hidden, hidden, bias=True)
        b.linear(f"{name}_prediction", "head", out, hidden, 1, bias=True, role="head")
    elif graph.family in ("bert", "ernie", "albert"):
        b = Builder(list(graph.nodes), stream="pooled")
        last = next(node.of[0] for node in graph if node.stream == "logits")
        out = b.linear("bert.pooler.dense", "head", last, hidden, hidden, bias=True)
        b.linear("cls.seq_relationship", "head", out, hidden, 2, bias=True)
    else:
        return graph
    return replace(graph, nodes=tuple(b.nodes))


def _classifying(graph: Graph, config: ModelConfig, head: str) -> Graph:
    hidden = graph.hidden
    is_encoder, is_modern = graph.family in _POOLED, graph.family == "modernbert"
    is_pooled = is_encoder and head == "sequence classification"
    b = Builder(_headless(graph), stream="pooled" if is_pooled else "tokens")
    out = b.nodes[-1].name
    if is_pooled or is_modern:
        bias = not is_modern or config.flag("classifier_bias", default=False)
        out = b.linear(_POOLED[graph.family], "head", out, hidden, hidden, bias=bias)
    if is_modern:
        params = hidden * (1 + config.flag("norm_bias", default=False))
        out = b.add("head.norm", "norm", out, params=params)
    name = "classifier" if is_encoder else "score"
    labels = 2 if head == "question answering" else labels_of(config)  # 2: answer start and end
    bias = is_encoder or head != "sequence classification"
    b.linear(name, "head", out, hidden, labels, bias=bias, role="head")
    return replace(graph, nodes=tuple(b.nodes))


def labels_of(config: ModelConfig) -> int:
    """Return the number of classes; transformers' default 2 if the config has none."""
    named = config.raw("id2label")
    if isinstance(named, dict) and named:
        return len(named)
    assumption = f"num_labels = {_LABELS}: the config has neither num_labels nor id2label"
    if "num_labels" not in config and assumption not in config.assumed:
        config.assumed.append(assumption)
    return config.integer("num_labels", default=_LABELS)


_LABELS = 2  # transformers' own default
