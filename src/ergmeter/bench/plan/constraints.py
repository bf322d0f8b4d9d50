"""Which cells are left out, and why?

`exclude` takes cells out of the plan; a constraint keeps them in it as skipped, with its reason, so
that a hole in the table of results is explained. Conditions are comparisons of settings
(`num_gpus > 1 and framework_config == "unsloth"`), read as a small part of Python's grammar and
nothing else of it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Name, ast.Load,
    ast.Constant, ast.Tuple, ast.List,
)  # fmt: skip
# YAML's own words for these.
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class BadCondition(Exception):  # noqa: N818  the text says what is wrong with it
    """The condition can't be read, or can't be told of a cell."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a cell's settings, and what to say where it does not hold."""

    text: str
    names: frozenset[str]
    code: CodeType
    reason: str = ""

    @classmethod
    def of(cls, text: str, *, reason: str = "") -> Condition:
        """Read it."""
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError) as error:
            raise BadCondition(f"{text!r} is no condition") from error
        for node in ast.walk(tree):
            if not isinstance(node, _ALLOWED):
                raise BadCondition(
                    f"{text!r} holds {type(node).__name__}; a condition compares settings"
                )
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        code = compile(tree, "<condition>", "eval")
        return cls(text, frozenset(names - _WORDS.keys()), code, reason)

    def holds(self, settings: Mapping[str, Any]) -> bool:
        """Whether it is true of a cell."""
        try:
            # Safe: of the grammar only the nodes above are let through, so nothing can be called.
            return bool(eval(self.code, {"__builtins__": {}}, {**_WORDS, **settings}))
        except (NameError, TypeError, ArithmeticError) as error:
            raise BadCondition(f"{self.text!r} can't be told: {error}") from error


def matches(pattern: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a cell has all these values; a list stands for any of its values."""
    return all(
        settings.get(name) in wanted if isinstance(wanted, list) else settings.get(name) == wanted
        for name, wanted in pattern.items()
    )
