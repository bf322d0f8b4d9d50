"""Where ranks stand in a layout, against the groups that Megatron-LM's own documentation lists."""

from __future__ import annotations

import pytest

from ergmeter.errors import UsageError
from ergmeter.runlog.settings import ParallelLayout, Settings


def groups(layout: str, world: int, dimension: str) -> list[list[int]]:
    """The ranks that differ along one dimension alone."""
    found: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in range(world):
        place = ParallelLayout.parsed(layout).at(rank, world)
        rest = tuple((name, at) for name, at in place.items() if name != dimension)
        found.setdefault(rest, []).append(rank)
    return list(found.values())


def test_the_16_gpus_that_megatrons_documentation_gives_as_its_example() -> None:
    """parallel_state.initialize_model_parallel: 2 for the tensors, 4 for the pipeline."""
    assert groups("tp=2,pp=4", 16, "tp") == [[2 * i, 2 * i + 1] for i in range(8)]
    assert groups("tp=2,pp=4", 16, "pp") == [
        [0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
    ]  # fmt: skip
    assert groups("tp=2,pp=4", 16, "dp") == [
        [0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15],
    ]  # fmt: skip


def test_an_order_of_ones_own_makes_other_neighbours() -> None:
    assert groups("tp=2,pp=2,order=tp-pp-dp", 8, "pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups("tp=2,pp=2,order=dp-pp-tp", 8, "tp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_experts_are_spread_over_ranks_that_are_data_parallel_in_all_else() -> None:
    assert groups("ep=4,tp=2", 8, "dp") == groups("tp=2", 8, "dp")


@pytest.mark.parametrize(
    ("layout", "world", "said"),
    [
        ("tp=3", 4, r"tp=3: 3 does not divide the 4 ranks"),
        ("tp=2,pp=4", 12, r"2 x 4 = 8 does not divide the 12 ranks"),
        ("tp=2,dp=2", 8, r"2 x 2 = 4 is not the 8 ranks"),
        ("ep=3", 8, r"3 expert-parallel ranks do not divide the 8 ranks of a pipeline stage"),
    ],
)
def test_a_layout_that_the_ranks_can_not_have(layout: str, world: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ParallelLayout.parsed(layout).check(world)


@pytest.mark.parametrize(
    "text", ["", "tp", "tp=0", "tp=x", "zp=2", "tp=2,tp=2", "tp=2,order=tp-zp", "tp=2,order=tp-tp",
             "tp=2,order=dp-pp"],
)  # fmt: skip
def test_what_is_no_layout_is_refused_when_it_is_declared(text: str) -> None:
    with pytest.raises(UsageError, match=r"layout|order"):
        Settings(layout=text)
