"""A document: what a command has to show, as typed parts that four renderers turn into text.

A subject is one function that returns a `Document`; it computes nothing and prints nothing. Every
text in a part is plain: renderers escape it, wrap it and give it colours.

    Document(
        title="llama: where the peak went",
        parts=(
            HeadlinePart("llama", about="over 40 steps"),
            Table(("block", TableColumn("share", "number")), (("idle", "10 %"),)),
            Section("advice", "most worth trying", (Items(("a larger batch",)),)),
        ),
        data={"blocks": [{"idle": 0.1}]},
        about="over 40 steps",
    )

`ergmeter.views.render` has the renderers: `terminal.show(document, console)`,
`markdown.markdown(document)`, `html.html(document)` and `json.json_text(document)`. JSON prints
`data`; the three others print the parts. Commands take `cli.options.with_forms`, which adds
`--json`, `--md` and `--html FILE`, and call `forms.show(document)`.

- `HeadlinePart` is the answer. A terminal prints every one. Markdown and HTML leave out a first one
  that only repeats the title and `about`, which a terminal does not print.
- `Table`: the kind of a column decides its layout. `number` is right-aligned and not wrapped,
  `basis` is coloured by its word, and so is a bench cell's `status` on a terminal. `below` is
  printed under its row on a terminal (a column elsewhere), `bar` is drawn on a terminal and left
  out elsewhere, and `links` is on pages only. Two columns of text without a head are a list of
  fields. On a terminal, a table with `row_titles` that is too wide continues below, with that many
  first columns repeated.
- `ChartPart`: the chart on a page; its table (or the chart's own data table) and the chart's note
  elsewhere. `ChartGrid`, `AxisChoice`, `TimeZoom`, `MetricCards` and `HeatMap` are for pages alone;
  a table beside them has their numbers.
- `Frame`: parts in a frame on a terminal, below a headline in Markdown. Pages leave it out: their
  sections have its numbers.
- `Note`: a finding or a verdict with its weight, and its effect, which may have several lines.
- `Section`: parts under a title. Pages link to its id; a folded one starts closed there. `media`
  are those that show it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ergmeter.views.charts.chart import Chart

State: TypeAlias = Literal["", "good", "bad", "unsure"]
VerdictWeight: TypeAlias = Literal[
    "better", "worse", "differs", "not shown", "no interval", "no verdict"
]
Weight: TypeAlias = Literal["serious", "minor", "remark", "ok", "absent"] | VerdictWeight
ColumnKind: TypeAlias = Literal["text", "number", "basis", "status", "below", "bar", "links"]
Style: TypeAlias = Literal["", "dim", "strong"]
Medium: TypeAlias = Literal["terminal", "markdown", "html"]

EVERYWHERE: tuple[Medium, ...] = ("terminal", "markdown", "html")
# The sign of a verdict, and its words.
VERDICTS: dict[VerdictWeight, tuple[str, str]] = {
    "better": ("+", "better"),
    "worse": ("-", "worse"),
    "differs": ("*", "differs"),
    "not shown": ("=", "no difference shown"),
    "no interval": ("?", "no interval"),
    "no verdict": ("", "absent"),
}


class SortableCell(str):
    """The text of a table cell that sorts by a value; None sorts last."""

    value: float | None

    def __new__(cls, text: str, value: float | None) -> SortableCell:
        """Return a cell with this text, sorted by `value`."""
        cell = super().__new__(cls, text)
        cell.value = value
        return cell


class BarCell(str):
    """A cell of a `bar` column: a bar from `low` to `high`, as shares of the column's width."""

    low: float
    high: float

    def __new__(cls, low: float, high: float) -> BarCell:
        """Return a cell without a text: other columns have the numbers."""
        cell = super().__new__(cls)
        cell.low, cell.high = min(low, high), max(low, high)
        return cell


class Link(NamedTuple):
    """A text linked to an address; plain text if the address is empty."""

    text: str
    address: str = ""


class LinkCell(str):
    """A cell of a `links` column."""

    links: tuple[Link, ...]

    def __new__(cls, links: tuple[Link, ...]) -> LinkCell:
        """Return a cell whose text is the links' texts, separated by commas."""
        cell = super().__new__(cls, ", ".join(link.text for link in links) or "-")
        cell.links = links
        return cell


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column: its title, how it is laid out and emphasised, and whether its text may wrap,
    or is cut where there is no room.

    On a terminal, it has at most `most_characters` if that is not 0, and the cells of a `below`
    column are indented by `indent` characters.
    """

    title: str = ""
    kind: ColumnKind = "text"
    style: Style = ""
    no_wrap: bool = False
    is_one_line: bool = False
    most_characters: int = 0
    indent: int = 3


def columns_of(first: str, *numbers: str, no_wrap: bool = False) -> tuple[TableColumn, ...]:
    """Return a column of text and columns of numbers."""
    return (
        TableColumn(first, no_wrap=no_wrap),
        *(TableColumn(title, "number") for title in numbers),
    )


@dataclass(frozen=True)
class Table:
    """A table. A column given as a title alone is a text column.

    `strong_rows` are emphasised. Pages can be sorted by a column if `is_sortable`. A terminal
    leaves out the titles unless `has_head`. The first `row_titles` columns name the rows. If it
    `is_grouped`, a row with a first cell begins a group, which a terminal sets apart. A
    terminal draws a line below the titles if it `has_rule`.
    """

    columns: tuple[str | TableColumn, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    is_sortable: bool = False
    has_head: bool = True
    strong_rows: frozenset[int] = frozenset()
    row_titles: int = 0
    is_grouped: bool = False
    has_rule: bool = True

    @property
    def layout(self) -> tuple[TableColumn, ...]:
        """The columns as TableColumn objects."""
        return tuple(
            TableColumn(column) if isinstance(column, str) else column for column in self.columns
        )

    @property
    def head(self) -> tuple[str, ...]:
        """The titles of the columns."""
        return tuple(column.title for column in self.layout)

    def without(self, kind: ColumnKind) -> Table:
        """Return the table without its columns of a kind."""
        return self.only([n for n, column in enumerate(self.layout) if column.kind != kind])

    def only(self, numbers: Sequence[int]) -> Table:
        """Return the table with these columns."""
        return replace(
            self,
            columns=tuple(self.columns[number] for number in numbers),
            rows=tuple(tuple(row[number] for number in numbers) for row in self.rows),
        )


@dataclass(frozen=True, slots=True)
class HeadlinePart:
    """The answer in a line: its subject (`name`), the answer (`text`) and its scope (`about`).

    The state decides the colour of the text.
    """

    name: str = ""
    text: str = ""
    about: str = ""
    state: State = ""


@dataclass(frozen=True, slots=True)
class ChartPart:
    """A chart; `table` replaces its data table where charts are not drawn."""

    chart: Chart
    table: Table | None = None

    def as_text(self) -> tuple[Part, ...]:
        """Return the parts that replace the chart where charts are not drawn."""
        table = self.table or self.chart.table
        if table is None:
            return (Note("absent", f"{self.chart.title}: {self.chart.reason}"),)
        return (table, *([Paragraph(self.chart.note, style="dim")] if self.chart.note else []))


_LEVELS = 5  # shades of a heat map


@dataclass(frozen=True, slots=True)
class HeatCell:
    """A cell of a heat map, shaded by its value. One without a value is drawn by its state."""

    text: str
    value: float | None = None
    state: str = "none"
    remarks: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()


@dataclass(frozen=True)
class HeatMap:
    """Values by two settings. A row has its name, then the cells of each column."""

    id: str
    title: str
    corner: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[HeatCell, ...], ...]], ...]
    note: str
    is_folded: bool = False

    def shade(self, cell: HeatCell) -> str:
        """Return how a cell is drawn: at a level of five, or by its state."""
        if cell.value is None or not math.isfinite(cell.value):
            return cell.state
        low, high = self._ends
        share = (cell.value - low) / (high - low) if high > low else 0.0
        return f"level{min(_LEVELS - 1, int(_LEVELS * share))}"

    @cached_property
    def _ends(self) -> tuple[float, float]:
        cells = (cell for _, row in self.rows for column in row for cell in column)
        values = [cell.value for cell in cells if cell.value is not None]
        finite = [value for value in values if math.isfinite(value)]
        return min(finite), max(finite)


@dataclass(frozen=True, slots=True)
class ChartGrid:
    """Charts beside one another on a page. Elsewhere another part has their numbers."""

    charts: tuple[Chart, ...]


@dataclass(frozen=True, slots=True)
class AxisChoice:
    """The x axes that a page offers for its charts, by name and title, and the initial one."""

    axes: tuple[tuple[str, str], ...]
    first: str


@dataclass(frozen=True, slots=True)
class TimeZoom:
    """Buttons that zoom a page's charts over time to the whole run or the counted part."""

    run_s: tuple[float, float] = (0.0, 1.0)
    counted_s: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class MetricCard:
    """A metric on a page: value, interval and basis, and below them names and texts to unfold."""

    title: str
    value: str
    interval: str
    basis: str
    impossible: str
    details: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class MetricCards:
    """Metrics beside one another on a page. Elsewhere another part has their numbers."""

    cards: tuple[MetricCard, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """A finding or a verdict, by its weight, and its effect in one or more lines."""

    weight: Weight
    text: str
    effect: str = ""


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Paragraph:
    """A paragraph, or a text to be copied verbatim, which is never wrapped.

    One that `is_one_line` is cut where a terminal has no room for it.
    """

    text: str
    is_to_copy: bool = False
    style: Style = ""
    is_one_line: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """Parts in a frame with a name and a status, coloured by its state.

    `about` is at the right of the top border, `below` in the bottom one. One that `is_dense` has
    no blank lines.
    """

    name: str
    status: str
    parts: tuple[Table | Paragraph | Note, ...]
    state: State = ""
    about: str = ""
    below: str = ""
    is_dense: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """Parts under a title. The id is what a page links to."""

    id: str
    title: str
    parts: tuple[Part, ...]
    is_folded: bool = False
    media: tuple[Medium, ...] = EVERYWHERE


Part: TypeAlias = (
    HeadlinePart
    | Table
    | ChartPart
    | ChartGrid
    | AxisChoice
    | TimeZoom
    | MetricCards
    | HeatMap
    | Note
    | Items
    | Paragraph
    | Frame
    | Section
)


@dataclass(frozen=True)
class Document:
    """What a command has to show. `data` is its JSON form."""

    title: str
    parts: tuple[Part, ...]
    data: Any = field(default_factory=dict)
    about: str = ""

    @property
    def body(self) -> tuple[Part, ...]:
        """The parts without a first headline that only repeats the title."""
        first = self.parts[0] if self.parts else None
        if (
            isinstance(first, HeadlinePart)
            and not first.text
            and first.about == self.about
            and self.title.lower().startswith(first.name.lower())
        ):
            return self.parts[1:]
        return self.parts

    @property
    def charts(self) -> list[Chart]:
        """All charts, in order."""
        charts: list[Chart] = []
        for part in every_part(self.parts):
            if isinstance(part, ChartPart):
                charts.append(part.chart)
            elif isinstance(part, ChartGrid):
                charts += part.charts
        return charts


def every_part(parts: tuple[Part, ...]) -> Iterator[Part]:
    """Yield parts, each section before those inside it."""
    for part in parts:
        yield part
        if isinstance(part, Section):
            yield from every_part(part.parts)


_FOR_PAGES = ChartGrid | AxisChoice | TimeZoom | MetricCards | HeatMap


def parts_for(parts: Sequence[Part], medium: Medium) -> list[Part]:
    """Return the parts that a medium shows; in text, tables and notes replace charts.

    Parts inside sections stay as they are.
    """
    return [piece for part in parts for piece in _for_medium(part, medium)]


def _for_medium(part: Part, medium: Medium) -> tuple[Part, ...]:
    if isinstance(part, Section):
        return (part,) if medium in part.media else ()
    if medium == "html":
        return () if isinstance(part, Frame) else (part,)
    if isinstance(part, ChartPart):
        return part.as_text()
    if isinstance(part, Table):
        return (part.without("links"),)
    if isinstance(part, Frame) and medium == "markdown":
        return (HeadlinePart(part.name, part.status), *part.parts)
    return () if isinstance(part, _FOR_PAGES) else (part,)


def printable_lines(text: str) -> str:
    """Return a text with blanks for its control characters other than line ends."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def title_case(title: str) -> str:
    """Return a title with a capital at its start."""
    return title[:1].upper() + title[1:]
