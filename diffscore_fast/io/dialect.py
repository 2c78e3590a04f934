"""How the fields of a delimited file are told apart: its delimiter, and what quotes and backslashes mean in it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from diffscore_fast.errors import InputError
from diffscore_fast.io.record import FileFormat

Quoting = Literal["none", "escaped", "rfc4180"]
QUOTINGS: tuple[str, ...] = ("auto", *get_args(Quoting))
DELIMITERS: dict[FileFormat, str] = {"csv": ",", "tsv": "\t"}
_ESCAPES = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


@dataclass(frozen=True)
class Dialect:
    r"""A way to write rows of text fields in a file.

    Parameters
    ----------
    delimiter : str
        The character between two fields.
    quoting : {"none", "escaped", "rfc4180"}
        - "none": a line is a row, and every other character stands for itself.
        - "escaped": a line is a row; in a field a tab, line feed, carriage return and backslash are written \t, \n, \r
          and \\, and a delimiter that is no tab as \xNN (its code). A backslash before anything else stands for itself.
        - "rfc4180": a field may stand in double quotes, and may then hold delimiters, line ends and doubled quotes.
    """

    delimiter: str
    quoting: Quoting

    @property
    def quoted(self) -> bool:
        """Whether quotes mean something, so that a row may have several lines."""
        return self.quoting == "rfc4180"

    def split(self, line: str) -> list[str]:
        """The fields of a line, of a dialect without quotes."""
        values = line.split(self.delimiter)
        if self.quoting == "escaped" and "\\" in line:
            meanings = {written: meant for meant, written in self._escapes().items()}
            pattern = re.compile("|".join(map(re.escape, meanings)))
            values = [pattern.sub(lambda found: meanings[found[0]], value) for value in values]
        return values

    def holds(self, value: str | None) -> bool:
        """Whether a field can hold the value as it is."""
        return self.quoting != "none" or not value or not any(mark in value for mark in (self.delimiter, "\n", "\r"))

    def written(self, value: str | None) -> str:
        """A value as a field; without quoting, what a field cannot hold is written as if it were "escaped"."""
        if not value:
            return ""
        if not self.quoted:
            return value.translate({ord(meant): text for meant, text in self._escapes().items()})
        special = self.delimiter in value or '"' in value or "\n" in value or "\r" in value
        return '"' + value.replace('"', '""') + '"' if special else value

    def joined(self, values: Iterable[str | None]) -> bytes:
        """A row without its line end. What UTF-8 cannot hold (a lone surrogate) is written as its escape."""
        return self.delimiter.join(map(self.written, values)).encode("utf-8", "backslashreplace")

    def _escapes(self) -> dict[str, str]:
        escapes = dict(_ESCAPES)
        if self.quoting == "escaped":
            escapes["\\"] = "\\\\"
        if self.delimiter != "\t":
            escapes[self.delimiter] = f"\\x{ord(self.delimiter):02x}"
        return escapes


@dataclass(frozen=True)
class DialectOptions:
    r"""What a user says about delimited files.

    Parameters
    ----------
    delimiter : str or None
        One ASCII character, or \t for a tab; None for the format's own.
    quoting : str
        A `Quoting`, or "auto": "rfc4180" for CSV; for TSV "none" where it is read, "escaped" where it is made of
        another format.

    Raises
    ------
    InputError
        If the delimiter cannot be one.
    """

    delimiter: str | None = None
    quoting: str = "auto"

    def __post_init__(self) -> None:
        if self.delimiter == "\\t":
            object.__setattr__(self, "delimiter", "\t")
        if self.delimiter is not None and not may_delimit(self.delimiter):
            raise InputError(
                f"--delimiter {self.delimiter!r}: give one ASCII character that is no letter, digit, "
                r"space, quote, backslash or line end, such as ';' or '|', or \t for a tab"
            )
        if self.quoting not in QUOTINGS:
            raise InputError(f"--quoting {self.quoting!r}: choose from {', '.join(QUOTINGS)}")

    def to_read(self, file_format: FileFormat) -> Dialect:
        """The dialect of an input."""
        return self._dialect(file_format, "none" if file_format == "tsv" else "rfc4180")

    def to_write(self, file_format: FileFormat) -> Dialect:
        """The dialect of an output that is made of a file of another kind."""
        return self._dialect(file_format, "escaped" if file_format == "tsv" else "rfc4180")

    def check_used(self, *formats: FileFormat) -> None:
        """Raise `InputError` where an option was given and no file is delimited."""
        if self != AUTO and not any(name in DELIMITERS for name in formats):
            given = "--quoting" if self.delimiter is None else "--delimiter"
            raise InputError(
                f"{given} is for CSV and TSV, and no file of this run is one; name the format with "
                "--format csv or --format tsv, or leave it out"
            )

    def _dialect(self, file_format: FileFormat, usual: Quoting) -> Dialect:
        quoting: Quoting = usual if self.quoting == "auto" else self.quoting  # type: ignore[assignment]
        return Dialect(self.delimiter or DELIMITERS[file_format], quoting)


AUTO = DialectOptions()  # nothing said


def may_delimit(text: str) -> bool:
    """Whether a text can be a delimiter: one ASCII character with no other meaning in fields."""
    return len(text) == 1 and text.isascii() and not text.isalnum() and text not in ' "\\\r\n\0'
