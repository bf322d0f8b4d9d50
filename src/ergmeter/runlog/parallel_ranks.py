"""Which ranks work on the same tokens: how a training is laid out over its ranks.

The trap: eight ranks that each count 4096 tokens. Data-parallel, they are 32 768 tokens; with the
model cut over all eight, tensor- or pipeline-parallel, they are 4096. Nothing in the counts tells
which, so the user or the framework says it.

    "tp=2,pp=4"                   sizes; data-parallel is what is left of the world
    "tp=2,pp=4,order=tp-pp-dp"    which ranks are neighbours, the innermost first

tp: tensor-, pp: pipeline-parallel: the same tokens. cp: context-parallel: each rank has its part of
every sequence, so tokens add up and samples do not. dp: data-parallel, sharded (FSDP, ZeRO) or not.
ep: expert-parallel: the experts are spread over ranks that are data-parallel in all else, so that
it changes no count (Megatron-LM, DeepSpeed and torchtitan all do it so). Without an order, ranks
are numbered as Megatron-LM does it, tp-cp-ep-dp-pp.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ergmeter.errors import UsageError

ORDER = ("tp", "cp", "ep", "dp", "pp")
WORDS = {
    "tp": "tensor-parallel",
    "cp": "context-parallel",
    "ep": "expert-parallel",
    "dp": "data-parallel",
    "pp": "pipeline-parallel",
}
_HOW = 'give sizes such as "tp=2,pp=4" (tp, cp, ep, dp, pp; order=tp-cp-ep-dp-pp)'


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes by dimension, and which of them ranks are counted along first."""

    sizes: dict[str, int]
    order: tuple[str, ...] = ORDER

    @classmethod
    def parsed(cls, text: object) -> ParallelLayout:
        """A layout as it is written. Raises UsageError for what is none."""
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f"layout {text!r} is none; {_HOW}")
        sizes: dict[str, int] = {}
        order: tuple[str, ...] = ORDER
        for part in text.replace(" ", "").split(","):
            name, _, value = part.partition("=")
            if name == "order":
                order = _order(value)
            elif name not in WORDS or not value.isdecimal() or int(value) < 1 or name in sizes:
                raise UsageError(f"layout {text!r}: {part!r} is no size; {_HOW}")
            else:
                sizes[name] = int(value)
        absent = [name for name in sizes if name not in order and name != "ep" and sizes[name] > 1]
        if absent:
            raise UsageError(f"layout {text!r}: {absent[0]} is not in the order {'-'.join(order)}")
        return cls(sizes, order)

    def check(self, world: int) -> None:
        """Refuse a layout that so many ranks can't have."""
        together = prod(size for name, size in self.sizes.items() if name != "ep")
        fits = world == together if "dp" in self.sizes else world % together == 0
        if not fits:
            must = "is not" if "dp" in self.sizes else "does not divide"
            ranks = "the 1 rank" if world == 1 else f"the {world} ranks"
            raise UsageError(f"layout {self}: {self._product()} {must} {ranks} of this training")
        experts = self.sizes.get("ep", 1)
        if (world // self.sizes.get("pp", 1)) % experts:
            raise UsageError(
                f"layout {self}: {experts} expert-parallel ranks do not divide the"
                f" {world // self.sizes.get('pp', 1)} ranks of a pipeline stage"
            )

    def at(self, rank: int, world: int) -> dict[str, int]:
        """Where a rank is along each dimension."""
        self.check(world)
        sizes = {name: self.sizes.get(name, 1) for name in ORDER if name != "ep"}
        sizes["dp"] = world // prod(size for name, size in sizes.items() if name != "dp")
        place = {}
        for name in (*self.order, *(n for n in ORDER if n not in self.order)):
            if name != "ep":
                rank, place[name] = divmod(rank, sizes[name])
        return place

    def _product(self) -> str:
        sizes = [size for name, size in self.sizes.items() if name != "ep"]
        factors = " x ".join(str(size) for size in sizes)
        return f"{factors} = {prod(sizes)}" if len(sizes) > 1 else factors or "1"

    def __str__(self) -> str:
        said = [f"{name}={size}" for name, size in self.sizes.items()]
        return ",".join(said + ([f"order={'-'.join(self.order)}"] if self.order != ORDER else []))


def _order(text: str) -> tuple[str, ...]:
    names = tuple(text.split("-"))
    unknown = [name for name in names if name not in WORDS]
    if unknown or len(set(names)) < len(names):
        raise UsageError(f"order {text!r} is none: give each of tp, cp, ep, dp and pp once, as in"
                         " tp-cp-ep-dp-pp, neighbours first")  # fmt: skip
    return names
