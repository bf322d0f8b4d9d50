"""With this folder on PYTHONPATH a Python begins and ends sooner, whatever program it is.

Garbage is seldom looked for among the million things that torch and transformers load, and not when
the program ends. Packages that the variable LEFT_OUT names are not found, as if they were not
installed: transformers, peft and pyarrow load some where they find them, whoever uses them.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from importlib.machinery import PathFinder
from typing import Any

LEFT_OUT = os.environ.get("LEFT_OUT", "").split()


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, fullname: str, *more: Any, **named: Any) -> Any:
        return None if fullname in LEFT_OUT else super().find_spec(fullname, *more, **named)


if LEFT_OUT:
    sys.meta_path[:] = [Finder if one is PathFinder else one for one in sys.meta_path]
gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)
