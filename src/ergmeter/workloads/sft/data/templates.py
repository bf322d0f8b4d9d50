"""How does an example read, and which part of it is to be learnt?

The trap: finding the answer again in text that is already put together, by counting the tokens of
the prompt or by searching for a mark. Here an example becomes parts, each with whether it bears
loss, and stays in parts until it is tokens.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ergmeter.errors import FormatError, UsageError
from ergmeter.workloads.sft.config.value_kinds import nearest
from ergmeter.workloads.sft.data.examples import ChatTurn, Example

_NAMED = re.compile(r"\{(\w+)\}")
_ANSWER = {"response", "output", "assistant"}
_QUESTION = {"prompt", "user", "instruction"}
_NAMES = [*sorted(_QUESTION), "input", "system", *sorted(_ANSWER)]
_JINJA = (".jinja", ".jinja2", ".j2")


@dataclass(frozen=True, slots=True)
class Rendered:
    """An example's text in parts, each with whether it bears loss.

    `is_marked`: the template wrote the marks of begin and end itself, so none are added.
    """

    parts: tuple[tuple[str, bool], ...]
    is_marked: bool = False

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(text for text, _ in self.parts)


class Plain:
    """What is asked, a new line, the answer: for a model that has no form of its own."""

    def rendered(self, example: Example) -> Rendered:
        """The example in parts."""
        if example.text is not None:
            return Rendered(((example.text, True),))
        parts = []
        for turn in example.turns:
            is_answer = turn.role == "assistant"
            parts.append((turn.text, is_answer))
            parts.append(("\n", is_answer))
        return Rendered(tuple(parts[:-1]))


class Chat:
    """A tokenizer's own chat template. Each answer bears loss, and what the template puts after."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401  of transformers
        self._tokenizer = tokenizer

    def rendered(self, example: Example) -> Rendered:
        """The example in parts, found by rendering it up to each answer and past it."""
        if example.text is not None:
            return Rendered(((example.text, True),))
        whole = self._text(example, example.turns, is_asking=False)
        parts, done = [], ""
        for place, turn in enumerate(example.turns):
            if turn.role != "assistant":
                continue
            before = self._text(example, example.turns[:place], is_asking=True)
            after = self._text(example, example.turns[: place + 1], is_asking=False)
            longer = (done, before, after, whole)
            if not all(more.startswith(less) for less, more in itertools.pairwise(longer)):
                raise UsageError(
                    f"{example.where}: the model's chat template changes earlier turns when later"
                    " ones come, so that answers can't be told apart; give data.template_path"
                )
            parts += [(before[len(done) :], False), (after[len(before) :], True)]
            done = after
        return Rendered(tuple(parts), is_marked=True)

    def _text(self, example: Example, turns: tuple[ChatTurn, ...], *, is_asking: bool) -> str:
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        try:
            said: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=is_asking
            )
        except TemplateError as error:
            raise UsageError(
                f"{example.where}: the model's chat template refuses this: {error}"
            ) from error
        return said


class TemplateFile:
    """A template file: {prompt}, {system} and so on; what follows {response} is learnt too.

    Without {response} the answer comes after the whole. A .jinja file is rendered as the prompt.
    """

    def __init__(self, path: Path) -> None:
        try:
            written = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise UsageError(f"no template at {path}") from error
        self._path = path
        self._jinja = None
        if path.suffix in _JINJA:
            try:
                self._jinja = ImmutableSandboxedEnvironment().from_string(written)
            except TemplateError as error:
                raise FormatError(f"{path} is no Jinja template: {error}") from error
            return
        self._before, self._after = self._divided(written)

    def rendered(self, example: Example) -> Rendered:
        """The example in parts."""
        if example.text is not None:
            return Rendered(((example.text, True),))
        fields = example.fields
        if fields is None:
            raise UsageError(
                f"{example.where} has several questions; the template {self._path} takes one"
            )
        answer = fields["response"]
        if self._jinja is not None:
            return Rendered(((self._of_jinja(fields, example.where), False), (answer, True)))
        return Rendered(
            ((_filled(self._before, fields), False), (answer + _filled(self._after, fields), True))
        )

    def _of_jinja(self, fields: Any, where: str) -> str:  # noqa: ANN401
        assert self._jinja is not None
        try:
            return self._jinja.render(**fields)
        except TemplateError as error:
            raise UsageError(f"{where}: the template {self._path} refuses this: {error}") from error

    def _divided(self, written: str) -> tuple[str, str]:
        """What comes before the answer and after it."""
        if "{{" in written or "{%" in written:
            raise UsageError(f"{self._path} reads like a Jinja template; name it .jinja")
        names = _NAMED.findall(written)
        for name in names:
            if name not in _NAMES:
                near = nearest(name, _NAMES)
                hint = f"did you mean {{{near}}}?" if near else f"there are {', '.join(_NAMES)}"
                raise UsageError(f"{self._path}: {{{name}}} is no placeholder; {hint}")
        if not _QUESTION & set(names):
            raise UsageError(f"{self._path} has no {{prompt}}, so every answer would be to nothing")
        answers = [found for found in _NAMED.finditer(written) if found[1] in _ANSWER]
        if len(answers) > 1:
            raise UsageError(f"{self._path} names the answer {len(answers)} times; once is enough")
        if not answers:
            return written, ""
        return written[: answers[0].start()], written[answers[0].end() :]


def _filled(written: str, fields: Any) -> str:  # noqa: ANN401
    """By name, in one pass: braces in what is put in are not looked at."""
    return _NAMED.sub(lambda found: fields[found[1]], written)


def template_for(path: Path | None, tokenizer: Any) -> Plain | Chat | TemplateFile:  # noqa: ANN401
    """The file's, else the tokenizer's own, else the plain one."""
    if path is not None:
        return TemplateFile(path)
    return Chat(tokenizer) if getattr(tokenizer, "chat_template", None) else Plain()
