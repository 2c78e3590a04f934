"""Inputs by URL, through pyarrow's file systems: here its local one in the place of a store."""

from __future__ import annotations

import gzip
import hashlib
from typing import Any

import pyarrow
import pytest
from pyarrow import fs, parquet

from diffscore_fast.errors import InputError
from diffscore_fast.io import remote
from diffscore_fast.io.files import open_reader
from diffscore_fast.io.remote import RemoteReadError, expand_remote, scheme_of


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A folder that stands for s3://bucket."""
    folder = tmp_path / "store" / "bucket"
    folder.mkdir(parents=True)
    system = fs.SubTreeFileSystem(str(tmp_path / "store"), fs.LocalFileSystem())
    monkeypatch.setattr(remote, "file_system", lambda url: (system, url.partition("://")[2]))
    return folder


def test_schemes_are_a_list_and_nothing_else():
    for url in ("s3://b/x", "GS://b/x", "hdfs://h:8020/x", "abfs://container@account.dfs.core.windows.net/x"):
        assert scheme_of(url) == url.partition(":")[0].lower()
    assert scheme_of("rows.jsonl") is scheme_of("/a/b:c") is scheme_of("-") is None
    for url in ("http://h/x", "file:///x", "simplecache::s3://b/x", "s3::gs://x", "memory://x", "github://a:b@/x"):
        with pytest.raises(InputError, match="is not read|are not read"):
            scheme_of(url)
    with pytest.raises(InputError, match="by the environment") as caught:
        scheme_of("s3://key:hidden@bucket/x")
    assert "hidden" not in str(caught.value)


def test_a_local_file_may_have_a_name_like_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "http:").mkdir()
    (tmp_path / "http:" / "x").write_text("")
    assert scheme_of("http://x") is None


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.csv", "a.parquet"])
def test_rows_of_every_format_are_read(bucket, name):
    texts = [f"text {row}" for row in range(700)]
    if name == "a.parquet":
        parquet.write_table(pyarrow.table({"text": texts}), bucket / name)
    else:
        lines = ["text", *texts] if name == "a.csv" else [f'{{"text": "{text}"}}' for text in texts]
        content = "".join(f"{line}\n" for line in lines).encode()
        content = gzip.compress(content) if name.endswith(".gz") else content
        with (
            pyarrow.CompressedOutputStream(str(bucket / name), "zstd")
            if name.endswith(".zst")
            else open(bucket / name, "wb") as file
        ):
            file.write(content)
    reader = open_reader(f"s3://bucket/{name}")
    assert [record.fields["text"] for record in reader] == texts
    assert reader.size == reader.position


def test_patterns_match_as_in_a_shell(bucket):
    for name in ("a.jsonl", "b.jsonl", "b.csv", "deep/c.jsonl", "deep/er/d.jsonl"):
        (bucket / name).parent.mkdir(parents=True, exist_ok=True)
        (bucket / name).write_text("")

    def names(pattern):
        return [path.removeprefix("s3://bucket/") for path in expand_remote(f"s3://bucket/{pattern}")]

    assert names("*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names("[b-z].*") == ["b.csv", "b.jsonl"]
    assert names("*/*.jsonl") == ["deep/c.jsonl"]
    assert names("**/*.jsonl") == ["a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/er/d.jsonl"]
    assert names("no*") == []
    with pytest.raises(InputError, match="name of the bucket"):
        expand_remote("s3://buck*/x")


class Broken:
    """A file that stops answering at some byte."""

    stops_at = 1 << 60

    def __init__(self, file):
        self._file = file

    def read_at(self, count, offset):
        if offset + count > self.stops_at:
            raise OSError("connection reset")
        return self._file.read_at(count, offset)

    def close(self):
        self._file.close()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet"])
def test_a_store_that_stops_answering_ends_the_run_and_spoils_no_row(bucket, monkeypatch, name):
    """A damaged local file ends in unusable rows; rows that were not received are not unusable."""
    rows = [hashlib.sha256(str(row).encode()).hexdigest() for row in range(100_000)]
    if name == "a.parquet":
        parquet.write_table(pyarrow.table({"text": rows}), bucket / name, row_group_size=10_000)
    else:
        content = "".join(f'{{"text": "{row}"}}\n' for row in rows).encode()
        (bucket / name).write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    opened = remote.RemotePath.open

    def broken(self):
        buffered: Any = opened(self)
        buffered.raw._file = Broken(buffered.raw._file)
        return buffered

    monkeypatch.setattr(remote.RemotePath, "open", broken)
    reader = open_reader(f"s3://bucket/{name}")
    monkeypatch.setattr(Broken, "stops_at", (bucket / name).stat().st_size * 2 // 3)
    records = []
    with pytest.raises(RemoteReadError, match="connection reset"):
        records.extend(record for record in reader)
    assert all(record.fields is not None for record in records)


def test_what_is_not_there_is_said(bucket):
    for url in ("s3://bucket/none.jsonl", "s3://bucket/none.parquet"):
        with pytest.raises(InputError, match="there is no such file"):
            open_reader(url)
    assert remote.RemotePath("s3://bucket").is_folder and not remote.RemotePath("s3://bucket/x").is_folder
