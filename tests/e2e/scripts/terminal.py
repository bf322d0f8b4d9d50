"""Says what it sees of its terminal, and again at every change of its size until told to end."""

import os
import signal
import sys
import time

CODES = "\x1b[31mred\x1b[0m\ttab \x1b[2Kcleared\rover\nzwölf ▁▂▃\n"


def show(*_: object) -> None:
    size = os.get_terminal_size(1) if os.isatty(1) else None
    os.write(1, f"{size.lines}x{size.columns}\n".encode() if size else b"no size\n")


signal.signal(signal.SIGWINCH, show)
print(sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty())
show()
print(CODES, end="")
print(CODES, end="", file=sys.stderr)
sys.stdout.flush()
while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):  # noqa: PTH110  it starts quicker
    time.sleep(0.02)
