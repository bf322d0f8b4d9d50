"""Import it before transformers, which loads less then: a script takes half of the time.

These are packages that it loads where it finds them, and that no script which imports this uses.
Nor does a script leave garbage enough to be looked for among a million things that were imported:
that is done seldom, and not when it ends.
"""

import atexit
import gc
import sys
from typing import Any

modules: dict[str, Any] = sys.modules
modules.update(dict.fromkeys(("bitsandbytes", "datasets", "pandas", "peft", "scipy", "sklearn")))
gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)
