"""One process that counts files by one way, for bench/hlo.py: WAY PROCESSES ROOT.

Imports are in every figure, so this file loads nothing that its way does not need.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plain_macs(data: bytes, module_class: Any) -> int:  # noqa: ANN401
    """Dots and kernels of all computations, as a script does that knows no more."""
    total = 0
    for computation in module_class.FromString(data).computations:
        rows = {row.id: row for row in computation.instructions}
        for row in computation.instructions:
            if row.opcode == "dot":
                left = rows[row.operand_ids[0]].shape.dimensions
                axes = row.dot_dimension_numbers.lhs_contracting_dimensions
                total += math.prod(row.shape.dimensions) * math.prod(left[axis] for axis in axes)
            elif row.custom_call_target == "AwsNeuronCustomNativeKernel":
                total += _mac_count(row.backend_config)
    return total


def _mac_count(config: bytes) -> int:
    try:
        return int(json.loads(base64.b64decode(config))["mac_count"])
    except (binascii.Error, ValueError, KeyError):
        return 0


def plain_file(path: Path) -> int:
    """A file by the plain way."""
    import gzip

    import hlo_schema

    module_class = plain_classes.setdefault("module", None) or hlo_schema.module_class()
    plain_classes["module"] = module_class
    data = path.read_bytes()
    return plain_macs(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data, module_class)


plain_classes: dict[str, Any] = {}


def counted(way: str, processes: int, paths: Sequence[Path]) -> int:
    """The MACs of all files, by a way."""
    if way == "whole":
        if processes == 1:
            return sum(map(plain_file, paths))
        from concurrent.futures import ProcessPoolExecutor

        ordered = sorted(paths, key=lambda path: -path.stat().st_size)
        with ProcessPoolExecutor(processes) as pool:
            return sum(pool.map(plain_file, ordered, chunksize=4))
    from ergmeter.hlo import count_files

    total = 0
    for found in count_files(paths):
        if found.count is None:
            raise RuntimeError(f"{found.path}: {found.error}")
        total += found.count.macs
    return total


def paths_in(root: Path) -> list[Path]:
    """A file, or the modules below a folder."""
    return [root] if root.is_file() else sorted(root.rglob("*.pb"))


def main() -> None:
    """Entry point."""
    kind, processes, root = sys.argv[1:]
    print(counted(kind, int(processes), paths_in(Path(root))))


if __name__ == "__main__":
    main()
