"""With this folder on PYTHONPATH a Python begins and ends sooner, whatever program it is.

Garbage is seldom looked for among the million things that torch and transformers load, and not when
the program ends. Packages that the variable LEFT_OUT names seem not to be installed: transformers
and peft load them where they find them, and a program that does not use them takes longer.
"""

import atexit
import gc
import os
import sys
from typing import Any

modules: dict[str, Any] = sys.modules
modules.update(dict.fromkeys(os.environ.get("LEFT_OUT", "").split()))
gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)
