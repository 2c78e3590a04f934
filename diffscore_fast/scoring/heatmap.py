"""Texts coloured by the scores of their tokens: as an HTML page without external resources, and in a terminal."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Group
from rich.text import Text

from diffscore_fast.arguments import checked_column
from diffscore_fast.errors import InputError
from diffscore_fast.scoring.table import ScoreTable
from diffscore_fast.status import SCORED

# Light enough for black text on every step (contrast above 7). The scales are fixed, so that pages can be compared.
LOG_PROB_COLOURS = ("#ffffff", "#fff0e0", "#ffe0c2", "#ffcfa3", "#ffbe85", "#ffab66", "#ff9847")
LOG_PROB_EDGES = (-0.5, -2.0, -4.0, -6.0, -8.0, -10.0)
DIFFERENCE_COLOURS = ("#7fb8ff", "#aed2ff", "#d9eaff", "#ffffff", "#ffe0c2", "#ffbe85", "#ff9847")
DIFFERENCE_EDGES = (4.0, 1.0, 0.25, -0.25, -1.0, -4.0)
PAGE_ROWS, TERMINAL_ROWS = 200, 20
MAX_GAP = 1000
UNSCORED = "never masked: no score"

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Token scores</title><style>
body {{ background: #fff; color: #000; font: 16px/1.7 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
.text {{ white-space: pre-wrap; overflow-wrap: anywhere }}
.none {{ border-bottom: 1px dotted #555 }}
h2 {{ font-size: 1em; margin: 1.5em 0 0 }} footer {{ overflow-wrap: anywhere; margin-top: 2em }}
{styles}
</style></head><body>
<h1>Token scores</h1>
<p>{unit} of each token; point at a token to read its value.</p>
<p>{legend}</p>
{rows}
<footer><p>{extent}</p><p>signature {signature}</p></footer>
</body></html>
"""


def heatmap_html(
    texts: Sequence[str | None], table: ScoreTable, *, max_rows: int = PAGE_ROWS, rows_in_all: int | None = None
) -> str:
    """A self-contained HTML page of the first rows; the value of every token is in its title.

    Parameters
    ----------
    texts : sequence of str
        The scored text of each row: the source (or the chosen reference) for `reverse`, else the candidate.
    table : ScoreTable
        Scored with token scores.
    max_rows : int
        Number of rows on the page at most; the page says how many there are in all.
    rows_in_all : int, optional
        Number of all rows, if the table has only the first of them.

    Raises
    ------
    InputError
        If the table has no token scores, or another number of rows.
    """
    texts = _checked(texts, table)
    colours, edges = _scale(table)
    styles = "\n".join(f".s{step} {{ background: {colour} }}" for step, colour in enumerate(colours))
    legend = " ".join(f'<span class="s{step}">{html.escape(label)}</span>' for step, label in enumerate(_labels(edges)))
    rows = []
    for row in range(min(max_rows, len(texts))):
        rows.append(f"<h2>{html.escape(_heading(table, row))}</h2>")
        pieces = []
        for piece, value in _pieces(texts[row], table, row):
            if value is None:
                pieces.append(html.escape(piece))
            elif math.isnan(value):
                pieces.append(f'<span class="none" title="{UNSCORED}">{html.escape(piece)}</span>')
            else:
                pieces.append(f'<span class="s{_step(value, edges)}" title="{value:.3f}">{html.escape(piece)}</span>')
        rows.append(f'<p class="text">{"".join(pieces)}</p>')
    return _PAGE.format(
        styles=styles,
        legend=f'{legend} <span class="none">{UNSCORED}</span>',
        rows="\n".join(rows),
        unit=_unit(table),
        extent=_extent(table, max_rows, rows_in_all),
        signature=html.escape(str(table.signature)),
    )


def heatmap_terminal(
    texts: Sequence[str | None], table: ScoreTable, *, max_rows: int = TERMINAL_ROWS, rows_in_all: int | None = None
) -> Group:
    """The same for a terminal, printed by rich. Parameters and errors as for `heatmap_html`."""
    texts = _checked(texts, table)
    colours, edges = _scale(table)
    lines = [
        Text.assemble(
            _unit(table),
            ": ",
            *((f" {label} ", f"#000000 on {colour}") for label, colour in zip(_labels(edges), colours, strict=True)),
        )
    ]
    for row in range(min(max_rows, len(texts))):
        lines.append(Text(_heading(table, row), style="bold"))
        line = Text()
        for piece, value in _pieces(texts[row], table, row):
            shown = printable(piece)
            scored = value is not None and not math.isnan(value)
            line.append(shown, f"#000000 on {colours[_step(value, edges)]}" if scored else None)  # type: ignore[arg-type]
        lines.append(line)
    return Group(*lines, Text(_extent(table, max_rows, rows_in_all)))


def _checked(texts: Sequence[str | None], table: ScoreTable) -> list[str | None]:
    texts = checked_column("texts", texts)
    if table.tokens is None:
        raise InputError("the table has no token scores; score with token_scores=True")
    if len(texts) != len(table):
        raise InputError(f"{len(texts)} texts but {len(table)} rows")
    return texts


def _scale(table: ScoreTable) -> tuple[tuple[str, ...], tuple[float, ...]]:
    if table.kind == "difference":
        return DIFFERENCE_COLOURS, DIFFERENCE_EDGES
    return LOG_PROB_COLOURS, LOG_PROB_EDGES


def _step(value: float, edges: tuple[float, ...]) -> int:
    return sum(value < edge for edge in edges)


def _labels(edges: tuple[float, ...]) -> list[str]:
    between = [f"{high:g} to {low:g}" for high, low in zip(edges[:-1], edges[1:], strict=True)]
    return [f"from {edges[0]:g}", *between, f"below {edges[-1]:g}"]


def _unit(table: ScoreTable) -> str:
    difference = table.kind == "difference"
    return "What the source adds to the log-prob (nats)" if difference else "Mean log-prob when masked (nats)"


def _heading(table: ScoreTable, row: int) -> str:
    if table.status[row] not in SCORED:
        return f"row {row + 1}: {table.status[row]}, {table.messages[row]}"
    return f"row {row + 1}: {table.scores[row]:.3f} nats per token"


def _extent(table: ScoreTable, max_rows: int, rows_in_all: int | None) -> str:
    shown, there = min(len(table), max_rows), len(table) if rows_in_all is None else rows_in_all
    return f"All {shown} rows." if shown == there else f"The first {shown} of {there} rows."


def _pieces(text: str | None, table: ScoreTable, row: int) -> Iterator[tuple[str, float | None]]:
    """The text in pieces with their values: that of a token, None between tokens. Nothing for a row without a score."""
    assert table.tokens is not None
    if table.status[row] not in SCORED or text is None:
        return
    owned = slice(int(table.tokens.offsets[row]), int(table.tokens.offsets[row + 1]))
    done = 0
    values = np.asarray(table.tokens.log_probs[owned])
    for (start, end), value in zip(table.tokens.spans[owned].tolist(), values.tolist(), strict=True):
        start = max(start, done)  # several tokens of one character have the same span: the first one shows it
        if start > done:
            yield _gap(text[done:start]), None
        if end > start:
            yield text[start:end], value
            done = end
    if done < len(text):
        yield _gap(text[done:]), None


def _gap(text: str) -> str:
    """Text without tokens (white space, the cut end of a source), at most MAX_GAP characters of it."""
    return text if len(text) <= MAX_GAP else f"{text[:MAX_GAP]}… ({len(text) - MAX_GAP} more characters)"


def printable(text: str) -> str:
    """The text with escape sequences, other control characters and lone surrogates replaced, safe for a terminal."""
    return "".join(item if item.isprintable() or item == "\n" else "\N{REPLACEMENT CHARACTER}" for item in text)
