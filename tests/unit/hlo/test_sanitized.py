"""The compiled reader must never read or write where it should not, whatever the file holds."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import ergmeter.hlo

SOURCE = Path(ergmeter.hlo.__file__).with_name("scan.c")
MODULES = sorted((Path(__file__).parents[2] / "data" / "hlo").rglob("*.pb"))
SANITIZERS = (
    "-std=gnu11",
    "-g",
    "-O1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)
# Damages each file a few thousand times and scans it; the buffer ends where the data does, so that
# a read past the end is seen. Prints how many scans were refused and how many were not.
HARNESS = """
#include <stdio.h>
#include "scan.c"

static uint64_t state = 88172645463325252ULL;
static uint64_t random_number(void) {
  state ^= state << 13; state ^= state >> 7; state ^= state << 17;
  return state;
}

int main(int count, char **paths) {
  long scanned = 0, refused = 0;
  for (int i = 1; i < count; i++) {
    FILE *file = fopen(paths[i], "rb");
    fseek(file, 0, SEEK_END);
    size_t size = (size_t)ftell(file);
    uint8_t *whole = malloc(size);
    rewind(file);
    if (fread(whole, 1, size, file) != size) return 2;
    fclose(file);
    for (int round = 0; round < ROUNDS; round++) {
      size_t kept = random_number() % 4 ? size : random_number() % size + 1;
      uint8_t *data = malloc(kept);
      memcpy(data, whole, kept);
      for (uint64_t flips = random_number() % 4; round && flips; flips--) {
        uint64_t at = random_number() % kept, how = random_number();
        if (how % 3 == 0) data[at] ^= (uint8_t)(1u << (how >> 8) % 8);
        else if (how % 3 == 1) data[at] = (uint8_t)(how >> 8);
        else data[at] |= 0x80;
      }
      scan *made = hlo_scan(data, (int64_t)kept);
      if (made) {
        int64_t place[2];
        for (int64_t one = 0; one < made->rows.count / ROW; one++)
          for (int64_t id = -1; id < 3; id++)
            if (hlo_place(made, one, id, place) == 1 && (place[0] < 0 || place[1] > (int64_t)kept))
              return 3;
      }
      made ? scanned++ : refused++;
      hlo_free(made);
      free(data);
    }
    free(whole);
  }
  printf("%ld %ld", scanned, refused);
  return 0;
}
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_no_damage_makes_the_compiled_reader_touch_memory_that_is_not_its_own(
    tmp_path: Path,
) -> None:
    small = [str(path) for path in MODULES if path.stat().st_size < 8192]
    assert len(small) > 20
    harness, program = tmp_path / "harness.c", tmp_path / "harness"
    harness.write_text(HARNESS)
    include = ["-DROUNDS=1000", f"-I{SOURCE.parent}"]
    built = subprocess.run(
        ["cc", *SANITIZERS, *include, "-o", program, harness], capture_output=True, text=True
    )
    if built.returncode and "san" in built.stderr:
        pytest.skip(f"this compiler has no sanitizers: {built.stderr[:200]}")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program, *small], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    scanned, refused = map(int, ran.stdout.split())
    assert min(scanned, refused) > len(small) * 100  # both ways were taken, and often
