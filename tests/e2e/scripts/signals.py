"""Notes the signals it gets in a file; ends a while after the one that it was told to end at.

signals.py LOG END_AT CODE [TIMES]
"""

import os
import signal
import sys
import time

log_path, end_at, code = sys.argv[1], sys.argv[2], int(sys.argv[3])
times = int(sys.argv[4]) if len(sys.argv) > 4 else 1
log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
ended: list[str] = []


def note(number: int, _frame: object) -> None:
    name = signal.Signals(number).name
    os.write(log, f"{name}\n".encode())
    if name == end_at:
        ended.append(name)


for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(caught, note)
os.write(log, b"ready\n")
print("ready", flush=True)
while len(ended) < times:
    time.sleep(0.02)
# Long enough for a second signal to come, if there is one, as a checkpoint would be.
until_s = time.monotonic() + 0.5
while time.monotonic() < until_s:
    time.sleep(0.05)
print("saved", flush=True)
sys.exit(code)
