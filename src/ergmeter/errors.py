"""The exceptions that ergmeter raises. A message has what happened, the value and what to do.

    ErgmeterError
      UsageError       the caller asked for something that makes no sense       exit 2
      NotMeasurable    the data do not support the number; the text is the reason, shown instead
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


class NotMeasurable(ErgmeterError):  # noqa: N818  as much a result as an error
    """The data do not support a number. The text is the reason, which the user sees unchanged."""


class FormatError(ErgmeterError):
    """A file is damaged or not in the expected format. The text has the path and the place."""


class PluginError(ErgmeterError):
    """A named plugin is missing or does not load. The text says what to install or enable."""


ALMOST = 0.9  # cutoff for a misspelt key among keys that are right


def closest(name: object, names: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The name among `names` that is closest to `name`; None if none is close enough."""
    import difflib  # noqa: PLC0415  only errors need it

    return next(iter(difflib.get_close_matches(str(name), list(names), n=1, cutoff=cutoff)), None)


def suggestion(
    name: object, names: Iterable[str], form: str = "did you mean {}? ", *, cutoff: float = 0.6
) -> str:
    """The closest match of a name as text for a message, by `form`; "" if there is none."""
    near = closest(name, names, cutoff=cutoff)
    return "" if near is None else form.format(near)
