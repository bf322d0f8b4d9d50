"""The exceptions that ergmeter raises. A message has what happened, the value and what to do.

    ErgmeterError
      UsageError       the caller asked for something that makes no sense       exit 2
      NotMeasurable    the data do not support the number; the text is why     shown as "- (why)"
      FormatError      a file is not what it claims to be (path, line or offset) exit 1
      PluginError      a named plugin is missing or does not load (what to install) exit 1

Third-party exceptions are translated into these once, where the third party is called.
"""

from __future__ import annotations

from collections.abc import Iterable


class ErgmeterError(Exception):
    """Anything ergmeter raises on purpose."""

    exit_code = 1


class UsageError(ErgmeterError):
    """The caller asked for something that makes no sense."""

    exit_code = 2


class NotMeasurable(ErgmeterError):  # noqa: N818  it is an answer as much as an error
    """The data cannot support the number. The text is the reason, shown to the user as it is."""


class FormatError(ErgmeterError):
    """A file is not what it claims to be. The text names the path and where in it."""


class PluginError(ErgmeterError):
    """A named plugin is missing or does not load. The text says what to install or enable."""


ALMOST = 0.9  # cutoff for a misspelt key among keys that are right


def closest(name: object, names: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The closest match of a name, if there is one."""
    import difflib  # noqa: PLC0415  only errors need it

    return next(iter(difflib.get_close_matches(str(name), list(names), n=1, cutoff=cutoff)), None)


def suggestion(
    name: object, names: Iterable[str], form: str = "did you mean {}? ", *, cutoff: float = 0.6
) -> str:
    """The closest match of a name, put into this form for a message; empty if there is none."""
    near = closest(name, names, cutoff=cutoff)
    return "" if near is None else form.format(near)
