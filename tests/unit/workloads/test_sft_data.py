"""The data of a training: every token where it belongs, counted as one counts by hand.

Most tests have a tokenizer of words, so that tokens can be counted by reading.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.errors import FormatError, UsageError
from ergmeter.integrations.batches import count_tokens
from ergmeter.workloads.sft import tiny_model
from ergmeter.workloads.sft.config_file import load
from ergmeter.workloads.sft.dataset import Chat, TemplateFile, builtin, plain, read, render
from ergmeter.workloads.sft.prepared_data import (
    NO_LOSS,
    Collate,
    Prepared,
    Row,
    epoch_tokens,
    packed,
    prepare_data,
)
from ergmeter.workloads.sft.tiny_model import saved_model
from tests.models import models as kept_models

PAD, BEGIN, END = 0, 1, 2


class Words:
    """A word is a token. It puts BEGIN before a text, as Llama's does, and ends none."""

    chat_template = None
    pad_token_id: int | None = PAD
    bos_token_id = BEGIN
    eos_token_id: int | None = END

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(
        self, text: str | list[str], *, add_special_tokens: bool = True, verbose: bool = True
    ) -> dict[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [self._ids(one, add_special_tokens) for one in text]}
        return {"input_ids": self._ids(text, add_special_tokens)}

    def _ids(self, text: str, marked: bool) -> list[int]:
        ids = [self.known.setdefault(word, 3 + len(self.known)) for word in text.split()]
        return [BEGIN, *ids] if marked else ids

    def said(self, ids: list[int]) -> str:
        names = {number: word for word, number in self.known.items()}
        return " ".join(names.get(one, f"<{one}>") for one in ids)


PAIRS = [
    {"prompt": "what is red", "response": "a rose"},
    {"prompt": "and blue", "response": "the sea and the sky"},
    {"prompt": "who", "response": "nobody"},
]
# By hand: begin, prompt, response, end; loss on the response and the end.
REAL = [1 + 3 + 2 + 1, 1 + 2 + 5 + 1, 1 + 1 + 1 + 1]
LOSS = [2 + 1, 5 + 1, 1 + 1]


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., Prepared]:
    def make(
        rows: list[dict[str, Any]] | str, tokenizer: Any = None, *, text: str = "", **changes: Any
    ) -> Prepared:
        data = tmp_path / ("train.txt" if isinstance(rows, str) else "train.jsonl")
        data.write_text(
            rows if isinstance(rows, str) else "\n".join(json.dumps(row) for row in rows)
        )
        path = tmp_path / "run.yaml"
        path.write_text(text or "model: {name: some/model, max_seq_len: 64}\n")
        config = load(path, changes={"data.train_path": str(data), **changes})
        return prepare_data(config, tokenizer or Words())

    return make


def all_of(data: Prepared) -> dict[str, torch.Tensor]:
    return data.collate([data.train[place] for place in range(len(data.train))])


def test_a_padded_batch_holds_the_tokens_one_counts_by_hand(
    prepare: Callable[..., Prepared],
) -> None:
    words = Words()
    data = prepare(PAIRS, words)
    batch = all_of(data)
    assert len(data.train) == data.documents == 3
    assert batch["input_ids"].shape == (3, max(REAL))
    assert batch["attention_mask"].sum(-1).tolist() == REAL
    counts = count_tokens(batch)
    assert counts is not None
    assert (counts.real, counts.loss, counts.computed) == (sum(REAL), sum(LOSS), 3 * max(REAL))
    found = epoch_tokens(data.train, data.collate, batch_size=3)
    assert (found.real, found.loss, found.computed) == (sum(REAL), sum(LOSS), 3 * max(REAL))
    assert words.said(data.train[0]["input_ids"]) == "<1> what is red a rose <2>"
    assert words.said(data.train[0]["labels"][4:]) == "a rose <2>"
    assert data.train[0]["labels"][:4] == [NO_LOSS] * 4


def test_batches_of_two_pad_to_their_own_longest(prepare: Callable[..., Prepared]) -> None:
    found = epoch_tokens((data := prepare(PAIRS)).train, data.collate, batch_size=2)
    assert found.computed == 2 * REAL[1] + REAL[2]
    assert (found.shortest, found.median, found.longest) == (4, 7, 9)


def test_an_end_that_is_also_the_padding_is_counted(prepare: Callable[..., Prepared]) -> None:
    words = Words()
    words.pad_token_id = END
    batch = all_of(prepare(PAIRS, words))
    assert batch["attention_mask"].sum().item() == sum(REAL)
    words.pad_token_id = None
    assert all_of(prepare(PAIRS, words))["attention_mask"].sum().item() == sum(REAL)


def test_rows_are_padded_up_to_a_multiple(prepare: Callable[..., Prepared]) -> None:
    batch = all_of(prepare(PAIRS, **{"data.pad_to_multiple_of": 8}))
    assert {one.shape for one in batch.values()} == {(3, 16)}
    assert batch["attention_mask"].sum().item() == sum(REAL)
    assert (batch["labels"] != NO_LOSS).sum().item() == sum(LOSS)


def test_a_packed_batch_holds_the_tokens_one_counts_by_hand(
    prepare: Callable[..., Prepared],
) -> None:
    data = prepare(PAIRS, **{"data.packing": True, "model.max_seq_len": 16})
    batch = all_of(data)
    assert (len(data.train), data.documents) == (2, 3)  # 7 + 9 fill a row of 16, 4 are left
    assert "attention_mask" not in batch  # with one, documents would see each other
    assert batch["position_ids"].tolist() == [[*range(7), *range(9)], [*range(4), *[0] * 12]]
    counts = count_tokens(batch)
    assert counts is not None
    assert (counts.real, counts.loss, counts.samples) == (sum(REAL), sum(LOSS), 3)
    found = epoch_tokens(data.train, data.collate, batch_size=2)
    assert (found.real, found.loss, found.computed) == (20, 11, 32)


def test_texts_that_are_packed_bear_no_loss_at_their_border(
    prepare: Callable[..., Prepared],
) -> None:
    data = prepare([{"text": "one two three"}, {"text": "four five"}], **{"data.packing": True})
    labels = data.train[0]["labels"]
    assert [place for place, label in enumerate(labels) if label == NO_LOSS] == [0, 5]
    counts = count_tokens(all_of(data))
    assert counts is not None
    assert (counts.real, counts.loss) == (5 + 4, 4 + 3)


def test_packed_documents_have_the_loss_they_have_alone() -> None:
    # The model is transformers' own: it must see the documents apart, from what it is given.
    torch.manual_seed(0)
    kind: Any = transformers.LlamaForCausalLM
    model = kind(
        transformers.LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )
    ).eval()  # fmt: skip
    model.config.use_cache = False  # with a cache it looks for no documents in the positions
    documents = [
        {"input_ids": ids, "labels": [NO_LOSS] * asked + ids[asked:]}
        for ids, asked in (([5, 6, 7, 8, 9], 2), ([10, 11, 12], 1), ([13, 14, 15, 16, 17, 18], 0))
    ]

    def loss_sum(rows: list[Row]) -> float:
        batch = Collate(fill=0, multiple=8)(rows)
        with torch.no_grad():
            loss = model(**batch).loss
        return float(loss) * int((batch["labels"][:, 1:] != NO_LOSS).sum())

    alone = sum(loss_sum([row]) for row in documents)
    together = packed(documents, longest=10)
    assert len(together) == 2
    assert loss_sum(together) == pytest.approx(alone, rel=1e-5)


@given(sizes=st.lists(st.integers(2, 20), min_size=1, max_size=40), longest=st.integers(20, 60))
def test_packing_loses_nothing_and_fills_no_row_past_its_length(
    sizes: list[int], longest: int
) -> None:
    numbers = iter(range(10_000))
    texts = [[next(numbers) for _ in range(size)] for size in sizes]
    documents = [{"input_ids": ids, "labels": list(ids)} for ids in texts]
    rows = packed(documents, longest=longest)
    assert [one for row in rows for one in row["input_ids"]] == list(range(sum(sizes)))
    assert max(len(row["input_ids"]) for row in rows) <= longest
    assert sum(row["position_ids"].count(0) for row in rows) == len(sizes)
    assert sum(row["labels"].count(NO_LOSS) for row in rows) == len(sizes)


def test_blocks_of_continued_pre_training_are_full_and_all_of_them_is_learnt(
    prepare: Callable[..., Prepared],
) -> None:
    # begin + words + end: 5 and 6, in a stream of 11: two blocks of 4, and 3 are left.
    data = prepare([{"text": "a b c"}, {"text": "d e f g"}], task_mode="cpt", block_size=4)
    batch = all_of(data)
    assert data.seq_len == 4
    assert batch["input_ids"].shape == (2, 4)
    assert batch["attention_mask"].sum().item() == 8
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert data.notes == ("the last 3 tokens fill no block and are not used",)
    counts = count_tokens(batch)
    assert counts is not None
    assert (counts.real, counts.loss) == (8, 2 * 3)


def test_a_text_file_is_one_document_to_continue_on(prepare: Callable[..., Prepared]) -> None:
    data = prepare("a b c\n\nd e f", task_mode="cpt", block_size=8)
    assert all_of(data)["attention_mask"].sum().item() == 8
    with pytest.raises(UsageError, match="write task_mode: cpt"):
        prepare("a b c")
    with pytest.raises(UsageError, match="8 tokens, less than one block of 16"):
        prepare("a b c d e f", task_mode="cpt", block_size=16)


def test_a_mixture_takes_rows_by_weight_and_none_twice(
    tmp_path: Path, prepare: Callable[..., Prepared]
) -> None:
    def source(name: str, number: int) -> str:
        lines = (json.dumps({"prompt": "q", "response": f"{name}{one}"}) for one in range(number))
        (tmp_path / name).write_text("\n".join(lines))
        return f"  - {{name: {name}, path: {tmp_path / name}, type: sft, weight: "

    text = "model: {name: m, max_seq_len: 8}\ntask_mode: cpt_mixed\ndatasets:\n"
    text += source("x", 30) + "3}\n" + source("y", 20) + "1}\n"
    words = Words()

    def said(seed: int) -> list[str]:
        data = prepare([], words, text=text, seed=seed, **{"data.train_path": None})
        return [words.said(data.train[place]["input_ids"][2:3]) for place in range(len(data.train))]

    first = said(1)
    # 30 of x are 3 parts of 4; the other part is 10 of y.
    assert sorted(one[0] for one in first) == ["x"] * 30 + ["y"] * 10
    assert len(set(first)) == 40
    assert first != sorted(first)  # drawn, not one after the other
    assert said(2) == first  # repeats of a training with other seeds are of the same text


def test_what_a_seq2seq_model_reads_and_says_is_counted_by_hand(
    prepare: Callable[..., Prepared],
) -> None:
    tokenizer = tiny_model.tokenizer("tiny-seq2seq")
    text = "model: {name: 'builtin:tiny-seq2seq', type: seq2seq, max_seq_len: 64}"
    pairs = [("Tell of Olav.", "Olav is glad."), ("Tell of Mira and of Ada.", "No.")]
    data = prepare([{"prompt": a, "response": b} for a, b in pairs], tokenizer, text=text)
    batch = all_of(data)
    # What is read ends with a new line, and both with their end.
    read_ = [len(tokenizer(asked + "\n")["input_ids"]) + 1 for asked, _ in pairs]
    said = [len(tokenizer(answer)["input_ids"]) + 1 for _, answer in pairs]
    assert batch["attention_mask"].sum(-1).tolist() == read_
    assert batch["decoder_attention_mask"].sum(-1).tolist() == said
    assert (batch["labels"] != NO_LOSS).sum(-1).tolist() == said
    assert count_tokens(batch).real == sum(read_) + sum(said)  # type: ignore[union-attr]
    found = epoch_tokens(data.train, data.collate, batch_size=2)
    assert (found.real, found.loss) == (sum(read_) + sum(said), sum(said))
    assert found.computed == 2 * max(read_) + 2 * max(said)
    # What transformers would have made of the labels itself.
    model = tiny_model.model("tiny-seq2seq")
    assert torch.equal(model._shift_right(batch["labels"]), batch["decoder_input_ids"])
    assert torch.isfinite(model(**batch).loss)


def test_a_decoder_that_begins_otherwise_is_left_to_its_model(
    prepare: Callable[..., Prepared],
) -> None:
    batch = all_of(prepare(PAIRS, text="model: {name: some/bart, type: seq2seq}"))
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}


def test_what_is_cut_and_left_out_is_told(prepare: Callable[..., Prepared]) -> None:
    rows = [*PAIRS, {"prompt": "a very long question indeed so long", "response": "no"}]
    data = prepare(rows, **{"model.max_seq_len": 7})
    assert len(data.train) == 3
    cut, left_out = data.notes
    assert cut == "2 examples were cut to 7 tokens, 5 tokens in all"  # of 9 and of 10
    assert left_out.startswith("1 examples were left out: nothing of their answer is within 7")
    assert "train.jsonl, line 4" in left_out
    assert data.train[1]["input_ids"][-1] != END  # it did not end there
    with pytest.raises(UsageError, match=r"no example is left.*raise model\.max_seq_len"):
        prepare(rows, **{"model.max_seq_len": 2})


def test_a_limit_takes_the_first_examples(prepare: Callable[..., Prepared]) -> None:
    assert prepare(PAIRS, **{"data.limit": 2}).documents == 2


def test_pack_factor_is_told_to_do_nothing(prepare: Callable[..., Prepared]) -> None:
    data = prepare([{"text": "a b c"}], task_mode="cpt", block_size=2, pack_factor=8)
    assert any("pack_factor has no effect" in note for note in data.notes)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "q", "response": "a"}, "q\na"),
        ({"prompt": "q", "completion": "a"}, "q\na"),
        ({"instruction": "q", "input": "of it", "output": "a"}, "q\n\nof it\na"),
        ({"instruction": "q", "input": "", "output": "a"}, "q\na"),
        ({"system": "be brief", "user": "q", "assistant": "a"}, "be brief\nq\na"),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            "q\na",
        ),
        ({"text": "just this"}, "just this"),
    ],
)
def test_each_form_of_an_example_is_read(tmp_path: Path, row: dict[str, Any], text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"\n{json.dumps(row)}\n\n")
    (example,) = read(path)
    assert render(example, plain).text == text
    assert example.where == f"{path}, line 2"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: must be an object; got list"),
        ('{"question": "q"}', "line 2: has the keys question; expected prompt and response"),
        ('{"prompt": "q", "response": ""}', "line 2: response is empty"),
        ('{"prompt": "q", "response": 5}', "line 2: response must be text; got int"),
        ('{"messages": [{"role": "user", "content": "q"}]}', "line 2: messages end with user"),
        ('{"messages": [{"role": "bot", "content": "q"}]}', "line 2: messages[0].role must be"),
        ('{"messages": []}', "line 2: messages must be a list"),
    ],
)
def test_a_line_that_holds_no_example_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(FormatError) as caught:
        read(path)
    assert said in str(caught.value)


def test_many_bad_lines_are_a_few_and_a_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("x\n" * 7)
    with pytest.raises(FormatError, match=r"line 3: .* \(and 4 more\)$"):
        read(path)
    path.write_text("\n\n")
    with pytest.raises(FormatError, match="holds no example"):
        read(path)
    with pytest.raises(UsageError, match="no data at"):
        read(tmp_path / "none.jsonl")


def test_a_template_says_how_an_example_reads(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"instruction": "q {input}", "input": "i", "output": "a"}))
    (example,) = read(data)
    file = tmp_path / "t.txt"
    file.write_text("Q: {instruction} ({input})\nA: {response} <end>")
    assert TemplateFile(file)(example).parts == (
        ("Q: q {input} (i)\nA: ", False),
        ("a <end>", True),
    )
    file.write_text("Q: {prompt}\n")
    assert TemplateFile(file)(example).parts == (
        ("Q: q {input}\n\ni\n", False),
        ("a", True),
    )
    jinja = tmp_path / "t.jinja"
    jinja.write_text("{% if system %}{{ system }}{% endif %}U: {{ user }} B: ")
    assert TemplateFile(jinja)(example).parts == (
        ("U: q {input}\n\ni B: ", False),
        ("a", True),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{promt}", "did you mean {prompt}?"),
        ("{system}", "answers would have no question"),
        ("{prompt}{response}{output}", "names the answer 2 times"),
        ("{{ prompt }}", r"name it \.jinja"),
    ],
)
def test_a_template_that_can_t_be_meant_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (file := tmp_path / "t.txt").write_text(text)
    with pytest.raises(UsageError, match=said):
        TemplateFile(file)


CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [("system", "s"), ("user", "u1"), ("assistant", "a1"), ("user", "u2"), ("assistant", "a2")]


def test_of_a_conversation_every_answer_is_learnt(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"messages": [{"role": a, "content": b} for a, b in TALK]}))
    (example,) = read(data)
    tokenizer = tiny_model.tokenizer("tiny")
    tokenizer.chat_template = CHATML
    assert Chat(tokenizer)(example).parts == (
        ("<system>s<end><user>u1<end><assistant>", False),
        ("a1<end>", True),
        ("<user>u2<end><assistant>", False),
        ("a2<end>", True),
    )
    # One that shows only the last two turns: where an answer began can't be told from it.
    tokenizer.chat_template = CHATML.replace("in messages", "in messages[-2:]")
    with pytest.raises(UsageError, match="changes earlier turns"):
        Chat(tokenizer)(example)
    (file := tmp_path / "t.txt").write_text("{prompt}")
    with pytest.raises(UsageError, match="has several questions"):
        TemplateFile(file)(example)


def test_the_built_in_text_is_the_same_each_time_and_what_is_held_out_is_not_trained_on() -> None:
    trained, held_out = builtin(longest=128)
    assert builtin(longest=128) == (trained, held_out)
    assert (len(trained), len(held_out)) == (2048, 64)
    told = {tale for one in trained for tale in one.turns[-1].text.split("\n")}
    assert not any(tale in told for one in held_out for tale in one.turns[-1].text.split("\n"))


@pytest.mark.parametrize("longest", [128, 1024])
def test_built_in_examples_fill_what_the_model_takes_and_are_not_cut(
    tmp_path: Path, longest: int
) -> None:
    (path := tmp_path / "run.yaml").write_text(
        f"model: {{name: 'builtin:tiny', max_seq_len: {longest}}}"
    )
    data = prepare_data(load(path), tiny_model.tokenizer("tiny"))
    lengths = [len(data.train[place]["input_ids"]) for place in range(len(data.train))]
    assert data.notes == ()
    assert 0.8 * longest < max(lengths) <= longest
    assert data.evaluation is not None


def test_the_collation_can_go_to_a_worker(prepare: Callable[..., Prepared]) -> None:
    data = prepare(PAIRS)
    there = pickle.loads(pickle.dumps((data.train, data.collate)))
    assert torch.equal(
        there[1]([there[0][0]])["input_ids"], data.collate([data.train[0]])["input_ids"]
    )


def test_a_built_in_model_that_another_was_quicker_to_make_is_left_as_it_is(
    tmp_path: Path,
) -> None:
    target = tmp_path / "tiny"
    tiny_model.make("tiny", target)
    before = [(one.name, one.stat().st_mtime_ns) for one in sorted(target.iterdir())]
    tiny_model.make("tiny", target)  # as one does that began when it was not there yet
    assert [(one.name, one.stat().st_mtime_ns) for one in sorted(target.iterdir())] == before
    assert list(tmp_path.iterdir()) == [target]


def test_a_built_in_model_is_made_by_a_process_of_its_own_and_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """In the folder of all tests: whichever needs it first has it made."""
    folder = kept_models(tmp_path_factory)
    code = (
        "import sys; from pathlib import Path;"
        "from ergmeter.workloads.sft.tiny_model import saved_model;"
        "print(saved_model('builtin:tiny', Path(sys.argv[1])));"
        "sys.exit('transformers' in sys.modules)"
    )
    words = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr  # and transformers was not loaded there
    path = done.stdout.strip()
    before = Path(path).stat().st_mtime_ns
    assert saved_model("builtin:tiny", folder) == Path(path)
    assert Path(path).stat().st_mtime_ns == before

    load_model: Any = transformers.AutoModelForCausalLM.from_pretrained
    load_tokenizer: Any = transformers.AutoTokenizer.from_pretrained
    model, tokenizer = load_model(path), load_tokenizer(path)
    # By hand: embeddings and head 2 x 1024 x 128; a layer's q and o 2 x 128 x 128, k and v
    # 2 x 128 x 64, its three of 128 x 352 and two norms of 128; the last norm.
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352 + 2 * 128
    assert model.num_parameters() == 2 * 1024 * 128 + 2 * layer + 128
    assert torch.equal(model.lm_head.weight, tiny_model.model("tiny").lm_head.weight)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.get_vocab() == tiny_model.tokenizer("tiny").get_vocab()
    assert tokenizer.decode(tokenizer("Grüße, {x}\n ok")["input_ids"]) == "Grüße, {x}\n ok"


def test_erg_prepare_tells_what_is_in_the_data(
    erg: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text("\n".join(json.dumps(row) for row in PAIRS))
    Path("run.yaml").write_text(
        "model: {name: 'builtin:tiny', max_seq_len: 64}\n"
        "data: {train_path: train.jsonl}\ntrain: {batch_size: 2}"
    )
    code, out, _ = erg("prepare", "--config", "run.yaml", "--json")
    assert code == 0
    said = json.loads(out)
    tokenizer = tiny_model.tokenizer("tiny")
    texts = [(row["prompt"] + "\n", row["response"]) for row in PAIRS]
    asked, answers = ([len(tokenizer(one[side])["input_ids"]) for one in texts] for side in (0, 1))
    assert said["training"]["real"] == sum(asked) + sum(answers) + 3
    assert said["training"]["loss"] == sum(answers) + 3
    assert "evaluation" not in said
    sample = Path("outputs/run/sample.txt").read_text()
    assert "what is red\n⟦a rose⟧" in sample
    code, out, _ = erg("prepare", "--config", "run.yaml")
    assert (code, "3 documents were read" in out) == (0, True)
    code, _, err = erg("prepare", "--config", "none.yaml")
    assert (code, "no file at none.yaml" in err) == (1, True)
