"""Prints steps, then what no log should hold, then more steps.

hostile.py MEGABYTES
"""

import array
import fcntl
import os
import sys
import termios
import time

megabytes = int(sys.argv[1])


def write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def read_off() -> None:
    """Until what was printed is read: lines that are read together open the window together."""
    left = array.array("i", [1])
    while left[0]:
        time.sleep(0.001)
        fcntl.ioctl(1, termios.FIONREAD, left)


def steps(first: int) -> None:
    for number in range(first, first + 10):
        time.sleep(0.01)
        write(b"step=%d loss=2.0 tokens=16\n" % number)
        read_off()


steps(0)
write(
    b"\0" * 1000
    + b"\n"
    + b"step=\0\0 tokens=\xff\xfe\n"
    + b"\r\r\r\n\n\x1b["
    + b"{" * 70_000
    + b"\n"
)
write(b"\0" * 100_000 + b"\n")
for _ in range(megabytes):
    write(b"loss=1 " * 149_796 + b"tail")
write(b"\n")
steps(10)
