"""Parquet: read in record batches, written back with the input's columns exactly as they are and new ones behind."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow
from pyarrow import parquet, types

from diffscore_fast.errors import InputError
from diffscore_fast.io.input import STANDARD_STREAM
from diffscore_fast.io.output import ColumnWriter
from diffscore_fast.io.record import FieldType, FileFormat, Record
from diffscore_fast.io.remote import RemotePath, scheme_of

BATCH_BYTES = 4 << 20  # read at once
BATCH_ROWS = 512
GROUP_BYTES = 32 << 20  # written at once, as one row group
GROUP_ROWS = 4096
_TEXT = pyarrow.string()
_SPAN = pyarrow.struct([("start", pyarrow.int64()), ("end", pyarrow.int64()), ("log_prob", pyarrow.float64())])
ARROW_TYPES: dict[FieldType, pyarrow.DataType] = {
    "number": pyarrow.float64(),
    "count": pyarrow.int64(),
    "text": _TEXT,
    "numbers": pyarrow.list_(pyarrow.float64()),
    "named_numbers": pyarrow.map_(_TEXT, pyarrow.float64()),
    "spans": pyarrow.list_(_SPAN),
}


class ParquetReader:
    """Reads records in order, in constant memory. Rows of a row group that cannot be read are unusable, each of them.

    A row with a string that is not UTF-8 is unusable too. A Parquet output has the row's values all the same, with
    U+FFFD for the bytes that are no UTF-8: what is written is always valid.

    Parameters
    ----------
    path : str
        A file or URL; its index is at the end, so that it cannot be a pipe.

    Raises
    ------
    InputError
        If the file cannot be opened, is cut or inconsistent, or has two columns of one name.
    """

    format: FileFormat = "parquet"
    blank_lines = 0

    def __init__(self, path: str) -> None:
        if path == STANDARD_STREAM:
            raise InputError("Parquet cannot be read from standard input: its index is at the end; give a file")
        self.path = path
        try:
            source = path if scheme_of(path) is None else RemotePath(path).open()
            self._file = parquet.ParquetFile(source, buffer_size=1 << 20, page_checksum_verification=True)
            self.schema = self._file.schema_arrow
        except FileNotFoundError:
            raise InputError(f"cannot read {path}: No such file or directory") from None
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise InputError(f"cannot read {path} as Parquet: {error}") from None
        self.columns: list[str] = self.schema.names
        if len(set(self.columns)) < len(self.columns):
            repeated = next(name for name in self.columns if self.columns.count(name) > 1)
            raise InputError(f"{path} has the column {repeated!r} twice; rename one")
        metadata = self._file.metadata
        self.size = metadata.num_rows
        if self.size != sum(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)):
            raise InputError(f"cannot read {path} as Parquet: its row groups do not add up to {self.size} rows")
        self.position = 0  # in rows

    def __iter__(self) -> Iterator[Record]:
        metadata = self._file.metadata
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            end = self.position + group.num_rows
            max_rows = BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)
            batches = self._file.iter_batches(max(1, min(BATCH_ROWS, max_rows)), row_groups=[index])
            problem = f"row group {index} ends early"
            while self.position < end:
                try:
                    batch = next(batches, None)
                except (pyarrow.ArrowException, OSError, ValueError) as error:
                    batch, problem = None, f"row group {index} cannot be read: {error}"
                if batch is None:
                    break
                yield from self._records(_Batch(batch))
            while self.position < end:
                self.position += 1
                yield Record(self.position, b"", None, f"row {self.position}: {problem}")

    def _records(self, batch: _Batch) -> Iterator[Record]:
        damaged = {} if _is_valid(batch.arrow) else self._damaged(batch.arrow)
        if damaged:
            batch.arrow = _repaired(batch.arrow)
        for index in range(batch.arrow.num_rows):
            self.position += 1
            if index in damaged:
                problem = f"row {self.position}: the column {damaged[index]!r} holds what is not UTF-8, or is damaged"
                yield ParquetRecord(self.position, b"", None, problem, batch, index)
            else:
                yield ParquetRecord(self.position, b"", _Fields(batch, index), "", batch, index)

    def _damaged(self, batch: pyarrow.RecordBatch) -> dict[int, str]:
        """Rows with values that are not what their type says, and the first such column of each."""
        found: dict[int, str] = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if not _is_valid(column):
                for index in range(len(column)):
                    if index not in found and not _is_valid(_one(column, index)):
                        found[index] = name
        return found


class _Batch:
    """A record batch, and its columns with the types that Python and JSON have."""

    def __init__(self, arrow: pyarrow.RecordBatch) -> None:
        self.arrow = arrow
        self.bytes_per_row = arrow.nbytes // max(arrow.num_rows, 1)
        self._plain: dict[str, pyarrow.Array] = {}

    def value(self, name: str, index: int) -> Any:
        try:
            if name not in self._plain:
                column = self.arrow.column(name)
                self._plain[name] = column.cast(_plain_type(column.type))
            return self._plain[name][index].as_py()
        except (pyarrow.ArrowException, ValueError, NotImplementedError) as error:
            raise InputError(f"a value of the column {name!r} has no form outside of Parquet: {error}") from None


class _Fields(Mapping[str, Any]):
    """The values of a row, read when they are asked for."""

    def __init__(self, batch: _Batch, index: int) -> None:
        self._batch, self._index = batch, index

    def __getitem__(self, name: str) -> Any:
        if name not in self._batch.arrow.schema.names:
            raise KeyError(name)
        return self._batch.value(name, self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.arrow.schema.names)

    def __len__(self) -> int:
        return self._batch.arrow.num_columns


@dataclass(frozen=True)
class ParquetRecord(Record):
    """A row of a Parquet file; it has a place in its batch even where its values cannot be used."""

    batch: _Batch | None = None
    index: int = 0

    @property
    def num_bytes(self) -> int:
        assert self.batch is not None
        return self.batch.bytes_per_row

    def json_fields(self) -> dict[str, Any]:
        """As for every record; dates and decimals are text, bytes base64, and NaN and infinities text."""
        assert self.fields is not None
        return {name: _json_value(value) for name, value in self.fields.items()}


class ParquetWriter(ColumnWriter):
    """Writes rows as Parquet, one row group at a time. The columns of other formats become text.

    A stopped run writes the rows it holds and the index, so that its partial file can be read; a killed one cannot.

    Parameters
    ----------
    path, columns, added
        As for `ColumnWriter`.
    schema : pyarrow.Schema or None
        Of an input in Parquet.
    """

    format: FileFormat = "parquet"
    appends = False

    def __init__(
        self, path: str, columns: list[str], added: Mapping[str, FieldType], schema: pyarrow.Schema | None
    ) -> None:
        if path.endswith((".gz", ".zst")):
            raise InputError(f"cannot write {path}: Parquet is compressed inside; leave out the last ending")
        super().__init__(path, columns, added)
        self._kept = schema or pyarrow.schema([(name, _TEXT) for name in columns])
        self._keeps_arrays = schema is not None
        self._schema = self._kept
        for name, kind in added.items():
            self._schema = self._schema.append(pyarrow.field(name, ARROW_TYPES[kind]))
        self._rows: list[tuple[Record, dict[str, Any]]] = []
        self._num_bytes = 0
        self._parquet: parquet.ParquetWriter | None = None

    def _begin(self) -> None:
        self._parquet = parquet.ParquetWriter(self._file, self._schema)

    def _write(self, record: Record, fields: dict[str, Any]) -> None:
        self._rows.append((record, fields))
        self._num_bytes += record.num_bytes
        if len(self._rows) >= GROUP_ROWS or self._num_bytes >= GROUP_BYTES:
            self._write_group()

    def _end(self) -> None:
        if self._parquet is None:
            return
        try:
            if self._rows:
                self._write_group()
        finally:
            self._parquet.close()

    def _write_group(self) -> None:
        rows, self._rows, self._num_bytes = self._rows, [], 0
        records = [record for record, _ in rows]
        columns = self._kept_arrays(records) if self._keeps_arrays else self._kept_texts(records)
        for name, kind in self._added.items():
            values = [_arrow_value(fields.get(name)) for _, fields in rows]
            columns.append(pyarrow.chunked_array([pyarrow.array(values, ARROW_TYPES[kind])]))
        assert self._parquet is not None
        self._parquet.write_table(pyarrow.Table.from_arrays(columns, schema=self._schema), len(rows))

    def _kept_texts(self, records: list[Record]) -> list[pyarrow.ChunkedArray]:
        texts = [record.text_fields() if record.fields is not None else {} for record in records]
        return [
            pyarrow.chunked_array([pyarrow.array([_arrow_value(row.get(name)) for row in texts], _TEXT)])
            for name in self._columns
        ]

    def _kept_arrays(self, records: list[Record]) -> list[pyarrow.ChunkedArray]:
        """The columns of the input: slices of its batches, nulls where a row could not be read."""
        runs: list[tuple[_Batch | None, int, int]] = []  # batch, first row, number of rows
        for record in records:
            batch, index = (record.batch, record.index) if isinstance(record, ParquetRecord) else (None, 0)
            if runs and runs[-1][0] is batch and (batch is None or sum(runs[-1][1:]) == index):
                runs[-1] = (batch, runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((batch, index, 1))
        unread = any(batch is None for batch, _, _ in runs)
        required = [field.name for field in self._kept if not field.nullable]
        if unread and required:
            raise InputError(
                f"rows that cannot be read would be null in the column {required[0]!r}, which allows no "
                "null; write JSON Lines"
            )
        return [
            pyarrow.chunked_array(
                [
                    pyarrow.nulls(count, field.type) if batch is None else batch.arrow.column(place).slice(first, count)
                    for batch, first, count in runs
                ],
                field.type,
            )
            for place, field in enumerate(self._kept)
        ]


def _is_valid(values: pyarrow.RecordBatch | pyarrow.Array) -> bool:
    try:
        values.validate(full=True)
    except pyarrow.ArrowInvalid:
        return False
    return True


def _one(values: pyarrow.Array, index: int) -> pyarrow.Array:
    """A value alone; a slice of lists would be checked with the values of all of them."""
    try:
        return values.take(pyarrow.array([index]))
    except pyarrow.ArrowException:
        return values.slice(index, 1)


def _repaired(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """The batch with valid strings throughout: U+FFFD for bytes that are no UTF-8.

    A damaged value of another type, such as a list with such a string, is null, or empty where its column allows none.
    """
    columns = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if not _is_valid(column):
            repaired = column
            with suppress(pyarrow.ArrowException):
                repaired = _with_valid_strings(column)
            column = repaired if _is_valid(repaired) else _without_damaged(column, field)
        columns.append(column)
    return pyarrow.RecordBatch.from_arrays(columns, schema=batch.schema)


def _with_valid_strings(values: pyarrow.Array) -> pyarrow.Array:
    kind = values.type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        raw = values.cast(pyarrow.large_binary() if types.is_large_string(kind) else pyarrow.binary()).to_pylist()
        return pyarrow.array([None if item is None else item.decode("utf-8", "replace") for item in raw], kind)
    return values


def _without_damaged(values: pyarrow.Array, field: pyarrow.Field) -> pyarrow.Array:
    kind = values.type
    empty = pyarrow.nulls(1, kind)
    if not field.nullable:
        empty = pyarrow.array([{} if types.is_struct(kind) else []], kind)
    single = (_one(values, index) for index in range(len(values)))
    return pyarrow.concat_arrays([item if _is_valid(item) else empty for item in single])


def _plain_type(kind: pyarrow.DataType) -> pyarrow.DataType:
    """The type with every date, time and decimal in it as text, and every dictionary as its values."""
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_temporal(kind) or types.is_decimal(kind):
        return _TEXT
    if types.is_map(kind):
        return pyarrow.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_plain_type(field.type)) for field in kind])
    if types.is_large_list(kind):
        return pyarrow.large_list(_plain_type(kind.value_type))
    if types.is_list(kind) or types.is_fixed_size_list(kind):
        return pyarrow.list_(_plain_type(kind.value_type))
    return kind


def check_plain(path: str, schema: pyarrow.Schema) -> None:
    """Refuse columns whose values have no form in text formats."""
    for field in schema:
        problem = _without_form(field.type)
        if problem:
            raise InputError(
                f"the column {field.name!r} of {path} cannot be written as text: {problem}; write "
                "Parquet, or leave the column out of the input"
            )


def _without_form(kind: pyarrow.DataType) -> str:
    """Why values of a type can be no Python objects; "" where they can."""
    if types.is_struct(kind) and len({field.name for field in kind}) < kind.num_fields:
        return "it has two fields of one name"
    if types.is_timestamp(kind) and kind.tz is not None:
        try:
            pyarrow.array([0], pyarrow.int64()).cast(kind).cast(_TEXT)
        except pyarrow.ArrowException as error:
            return str(error)
    inner = [kind.value_type] if types.is_dictionary(kind) else [kind.field(i).type for i in range(kind.num_fields)]
    return next(filter(None, map(_without_form, inner)), "")


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, dict):
        return {name: _json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)  # a UUID, say


def _arrow_value(value: Any) -> Any:
    """A value for pyarrow.array; a lone surrogate, which UTF-8 cannot hold, as its escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return list(value.items()) if isinstance(value, dict) else value
