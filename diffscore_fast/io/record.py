"""One row of a file, whatever its format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

FileFormat = Literal["jsonl", "csv", "tsv", "parquet"]
# What an added field holds: a float or null, a whole number, text, a list of floats, floats by name, or
# [start, end, log-prob] triples. Parquet needs to know before the first row.
FieldType = Literal["number", "count", "text", "numbers", "named_numbers", "spans"]


@dataclass(frozen=True)
class Record:
    """One row of a file.

    Parameters
    ----------
    line : int
        Line number in the file where the row begins, from 1; in Parquet, the row number.
    raw : bytes
        The row's text without its line end; empty in Parquet.
    fields : mapping or None
        Its values by name; None where the row cannot be used.
    problem : str
        Why not.
    """

    line: int
    raw: bytes
    fields: Mapping[str, Any] | None
    problem: str = ""

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        return len(self.raw)

    def json_fields(self) -> dict[str, Any]:
        """The values of a usable row as JSON has them."""
        assert self.fields is not None
        return dict(self.fields)

    def text_fields(self) -> dict[str, str | None]:
        """The values of a usable row as text: strings as they are, null as None, others as JSON."""
        return {name: value_text(value) for name, value in self.json_fields().items()}


def value_text(value: Any) -> str | None:
    """A value for a format that holds text only."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
