"""Which tokens is an example, and which of them bear loss?

The trap: the end of a text. A token for it that is also the padding is taken for padding; one that
is left out teaches the model never to stop; one put behind text that was cut teaches it to stop in
mid-sentence. It is added here to what is whole, and padding is told by length alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ergmeter.errors import UsageError
from ergmeter.workloads.sft.data.templates import Rendered

NO_LOSS = -100  # what torch's cross entropy leaves out
_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Tokens:
    """A document's tokens and its labels: the same, or NO_LOSS where nothing is to be learnt.

    Of a seq2seq model they are the encoder's and the decoder's, and differ in length.
    """

    ids: list[int]
    labels: list[int]


@dataclass(slots=True)
class Truncated:
    """What did not fit, to be told."""

    longest: int
    documents: int = 0
    tokens: int = 0
    without_answer: list[str] = field(default_factory=list)

    def fitted(self, ids: list[int], labels: list[int]) -> Tokens:
        """As much as fits."""
        over = len(ids) - self.longest
        if over > 0:
            self.documents += 1
            self.tokens += over
        return Tokens(ids[: self.longest], labels[: self.longest])

    @property
    def lines(self) -> list[str]:
        """For whoever asked for this."""
        said = []
        if self.documents:
            said.append(
                f"{self.documents} examples were cut to {self.longest} tokens, {self.tokens} tokens"
                " in all"
            )
        if self.without_answer:
            said.append(
                f"{len(self.without_answer)} examples were left out: nothing of their answer is"
                f" within {self.longest} tokens (first: {self.without_answer[0]})"
            )
        return said


class TextEncoder:
    """A tokenizer, and what it puts at the begin and at the end of a text."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401  of transformers
        self._tokenizer = tokenizer
        added = tokenizer("")["input_ids"]
        begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.begin = [begin] if begin is not None and begin in added else []
        self.end = [] if end is None else [end]

    def causal(
        self, rendered: Sequence[Rendered], where: Sequence[str], cut: Truncated
    ) -> list[Tokens]:
        """Documents for a causal model, without those whose answer was cut away."""
        found = []
        for name, one, parts in zip(where, rendered, self._parts(rendered), strict=True):
            ids = [] if one.is_marked else list(self.begin)
            labels = [NO_LOSS] * len(ids)
            for (_, bears_loss), part in zip(one.parts, parts, strict=True):
                ids += part
                labels += part if bears_loss else [NO_LOSS] * len(part)
            if not one.is_marked:
                ids, labels = ids + self.end, labels + self.end
            tokens = cut.fitted(ids, labels)
            # The first token is predicted from nothing.
            if any(label != NO_LOSS for label in tokens.labels[1:]):
                found.append(tokens)
            else:
                cut.without_answer.append(name)
        if not found:
            raise UsageError(
                f"no example is left: none has an answer within {cut.longest} tokens; raise"
                " model.max_seq_len"
            )
        return found

    def seq2seq(self, rendered: Sequence[Rendered], cut: Truncated) -> list[Tokens]:
        """What the encoder reads and what the decoder is to say, each with its end."""
        found = []
        for one, parts in zip(rendered, self._parts(rendered), strict=True):
            read: list[int] = list(self.begin)
            said: list[int] = []
            for (_, bears_loss), part in zip(one.parts, parts, strict=True):
                (said if bears_loss else read).extend(part)
            over = max(len(read), len(said)) + 1 - cut.longest
            if over > 0:
                cut.documents += 1
                cut.tokens += max(0, len(read) + 1 - cut.longest)
                cut.tokens += max(0, len(said) + 1 - cut.longest)
            found.append(Tokens((read + self.end)[: cut.longest], (said + self.end)[: cut.longest]))
        return found

    def texts(self, rendered: Sequence[Rendered]) -> list[list[int]]:
        """Whole documents, all of which is to be learnt."""
        return [
            [*self.begin, *(token for part in parts for token in part), *self.end]
            for one, parts in zip(rendered, self._parts(rendered), strict=True)
        ]

    def _parts(self, rendered: Sequence[Rendered]) -> Iterator[list[list[int]]]:
        """The tokens of each part of each document."""
        for start in range(0, len(rendered), _AT_ONCE):
            chunk = rendered[start : start + _AT_ONCE]
            flat = [text for one in chunk for text, _ in one.parts]
            # verbose: it warns of texts that are longer than the model, which are cut here.
            ids = self._tokenizer(flat, add_special_tokens=False, verbose=False)["input_ids"]
            place = 0
            for one in chunk:
                yield ids[place : place + len(one.parts)]
                place += len(one.parts)
