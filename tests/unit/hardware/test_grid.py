"""The table of grids against figures that others published, and names that must not be guessed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.errors import UsageError
from ergmeter.hardware.grid import SOURCES, GridIntensity, grid_named, grids, with_grid

COUNTRIES = [row for row in grids() if row.source is SOURCES["ember"]]
SUBREGIONS = [row for row in grids() if row.source is SOURCES["egrid"]]

# Our World in Data, "Carbon intensity of electricity generation", 2024, in whole g/kWh.
IN_DATA = {
    "Australia": 552, "Austria": 103, "Belgium": 118, "Canada": 175, "Czech Republic": 414,
    "Denmark": 143, "Estonia": 341, "Finland": 72, "France": 44, "Germany": 344,
    "Netherlands": 253,
}  # fmt: skip
# eGRID2023 rev2, SRC2ERTA and USC2ERTA of the data file, in lb/MWh.
OF_THE_DATA_FILE = {"RFCE": 599.170, "CAMX": 429.983, "PRMS": 1548.530, "US-EGRID": 770.884}
# The 27 subregions of eGRID2023's map.
MAP = """AKGD AKMS AZNM CAMX ERCT FRCC HIMS HIOA MROE MROW NEWE NWPP NYCW NYLI NYUP PRMS RFCE RFCM
RFCW RMPA SPNO SPSO SRMV SRMW SRSO SRTV SRVC"""


@pytest.mark.parametrize(("name", "published"), IN_DATA.items())
def test_a_country_is_as_our_world_in_data_has_it(name: str, published: int) -> None:
    row = grid_named(name)
    assert row.year == 2024
    assert round(row.g_per_kwh) == published


@pytest.mark.parametrize(("code", "lb_per_mwh"), OF_THE_DATA_FILE.items())
def test_a_subregion_is_as_the_data_file_has_it_and_converted(code: str, lb_per_mwh: float) -> None:
    row = grid_named(code)
    assert row.published == pytest.approx(lb_per_mwh, abs=0.05)
    # A pound is 453.59237 g, a megawatt-hour a thousand kilowatt-hours.
    assert row.g_per_kwh == pytest.approx(lb_per_mwh * 453.59237 / 1000, rel=2e-4)


def test_every_subregion_of_the_map_is_there() -> None:
    assert {row.code for row in SUBREGIONS} == {*MAP.split(), "US-EGRID"}


def test_the_subregions_lie_around_the_average_of_all() -> None:
    rates = [row.published for row in SUBREGIONS if row.code != "US-EGRID"]
    assert min(rates) < grid_named("US-EGRID").published < max(rates)


@pytest.mark.parametrize("row", grids(), ids=lambda row: row.code)
def test_a_row_is_whole_and_plausible(row: GridIntensity) -> None:
    # Hydro alone is about 24 g over its life, lignite burnt badly about 1300.
    assert 20 <= row.g_per_kwh <= 1400
    assert 2022 <= row.year <= 2024
    assert row.source.title in row.text
    assert str(row.year) in row.text
    assert all(name == name.strip() and name for name in row.names)


def test_there_are_most_countries_each_by_both_iso_codes() -> None:
    places = [row for row in COUNTRIES if row.code not in ("EU", "WORLD")]
    assert len(places) >= 150
    assert all(re.fullmatch("[A-Z]{3}", row.code) for row in places)
    assert all(re.fullmatch("[A-Z]{2}", row.also[0]) for row in places)


def test_no_name_means_two_grids() -> None:
    folded = [name.casefold() for row in grids() for name in {*map(str.casefold, row.names)}]
    assert len(folded) == len(set(folded))


@given(st.sampled_from(grids()), st.data())
def test_any_of_its_names_finds_a_grid_whatever_the_case(
    row: GridIntensity, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(row.names))
    for spelled in (name, name.lower(), f"  {name.lower()} ", name.replace(" ", "  ")):
        assert grid_named(spelled) is row


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("Germny", "DEU (Germany)"),
        ("California", "CAMX (WECC California)"),
        ("Georgia", "GEO (Georgia (country))"),  # or the state: not for us to say
        ("Congo", "COD (Congo (Kinshasa)) or COG (Congo (Brazzaville))"),  # 714 or 27 g/kWh
        ("korea", "PRK (North Korea) or KOR"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, suggested: str) -> None:
    with pytest.raises(UsageError, match=re.escape(suggested)) as raised:
        grid_named(name)
    assert repr(name) in str(raised.value)
    assert "`erg grid`" in str(raised.value)


@pytest.mark.parametrize("name", ["Atlantis", "", "q", 42, True])
def test_what_is_like_nothing_is_refused_and_not_guessed(name: object) -> None:
    with pytest.raises(UsageError) as raised:
        grid_named(name)
    assert "did you mean" not in str(raised.value)
    assert "`erg grid`" in str(raised.value)


@given(st.text(max_size=12))
def test_no_text_gets_a_grid_that_is_not_called_so(text: str) -> None:
    try:
        row = grid_named(text)
    except UsageError:
        return
    assert " ".join(text.split()).casefold() in {name.casefold() for name in row.names}


def test_a_grid_by_name_becomes_its_figure_and_source() -> None:
    found = with_grid({"grid": "norway", "pue": 1.1, "grid_source": None})
    assert found.keys() == {"pue", "grid_g_per_kwh", "grid_source"}
    assert found["grid_g_per_kwh"] == 30.75
    assert found["grid_source"].startswith("Norway, location-based, Ember")
    assert with_grid({"grid": None, "grid_g_per_kwh": 5}) == {"grid_g_per_kwh": 5}


@pytest.mark.parametrize("other", [{"grid_g_per_kwh": 0.0}, {"grid_source": "mine"}])
def test_a_grid_by_name_and_a_figure_are_two_answers(other: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="not both"):
        with_grid({"grid": "NO", **other})
