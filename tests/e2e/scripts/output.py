"""Writes so many arbitrary bytes to each output, the same ones every time, and exits as told."""

import os
import random
import sys

stdout_bytes, stderr_bytes, code = map(int, sys.argv[1:])
noise = random.Random(5)
for fd, size in ((2, stderr_bytes), (1, stdout_bytes)):
    data = noise.randbytes(size)
    while data:
        data = data[os.write(fd, data[:30_000]) :]
sys.exit(code)
