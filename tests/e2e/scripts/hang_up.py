"""Prints on after its terminal is gone, and notes what came of it."""

import os
import signal
import sys
from pathlib import Path

signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.write(1, b"ready\n")
outcome = "printed everything"
try:
    for _ in range(2000):
        os.write(1, b"step=1 loss=2.0 tokens=256 and some more to fill the buffers with\n" * 10)
        signal.sigtimedwait([], 0.001)
except OSError as error:
    outcome = type(error).__name__ + " " + str(error.errno)
Path(sys.argv[1]).write_text(outcome)
