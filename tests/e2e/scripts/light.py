"""Import it before transformers, which loads less then: a script begins in two thirds of the time.

These are packages that it loads where it finds them, and that no script which imports this uses.
"""

import sys
from typing import Any

modules: dict[str, Any] = sys.modules
modules.update(dict.fromkeys(("bitsandbytes", "datasets", "pandas", "peft", "scipy", "sklearn")))
