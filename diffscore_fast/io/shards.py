"""Several input files, the output folder in which each has a shard of its own, and the record of finished shards."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffscore_fast.errors import InputError
from diffscore_fast.io.files import format_of
from diffscore_fast.io.input import STANDARD_STREAM
from diffscore_fast.io.output import partial_path, state_path, sync_folder
from diffscore_fast.io.record import FileFormat
from diffscore_fast.io.remote import WILDCARDS, RemotePath, base_name, expand_remote, scheme_of

# Programs that read a folder of files (Spark, pyarrow.dataset, Hive) pass over names that begin with an underscore.
RECORDS_FOLDER = "_diffscore"
_SIGNATURE = ".signature.json"  # beside an output that is a single file
_RECORD_TYPES = {"identity": str, "input": list, "rows": dict}


@dataclass(frozen=True)
class Shard:
    """An input and where its rows go.

    Parameters
    ----------
    input_path : str
        A local path or URL.
    output_path : str
        A file directly in the output folder.
    record_path : Path
        Where it is noted that the shard is finished.
    """

    input_path: str
    output_path: str
    record_path: Path

    @property
    def name(self) -> str:
        return os.path.basename(self.output_path)

    @property
    def is_finished(self) -> bool:
        """Whether an earlier run has finished it: the output has its name, and the record is there."""
        return os.path.lexists(self.output_path) and self.record_path.exists()


def are_several(inputs: Sequence[str], output: str) -> bool:
    """Whether a command is about shards in a folder, and not about one file."""
    if len(inputs) > 1 or output.endswith("/") or os.path.isdir(output):
        return True
    (path,) = inputs
    if path == STANDARD_STREAM:
        return False
    if scheme_of(path) is not None:
        return path.endswith("/") or any(mark in path for mark in WILDCARDS) or RemotePath(path).is_folder
    return os.path.isdir(path) or (any(mark in path for mark in WILDCARDS) and not os.path.exists(path))


def find_inputs(arguments: Sequence[str], file_format: FileFormat | None) -> tuple[list[str], list[str]]:
    """The files that folders, patterns and names stand for, in order; those of a folder or pattern by name.

    Parameters
    ----------
    arguments : sequence of str
        Folders, patterns with `*`, `?`, `[...]` and `**`, and files; local or URLs.
    file_format : FileFormat or None
        If None, only those files of a folder whose names say their format are taken.

    Returns
    -------
    files, passed_over : list of str
        The second: files of folders whose names say no format.

    Raises
    ------
    InputError
        If one stands for no file.
    """
    files: list[str] = []
    passed_over: list[str] = []
    for argument in arguments:
        if argument == STANDARD_STREAM:
            raise InputError("standard input is one file; it cannot be one of several, nor go to a folder")
        if scheme_of(argument) is not None:
            is_pattern = any(mark in argument for mark in WILDCARDS)
            found = expand_remote(argument) if is_pattern else _below(argument, RemotePath(argument))
        elif os.path.isdir(argument):
            found = [os.path.join(argument, name) for name in sorted(os.listdir(argument))]
            found = [path for path in found if os.path.isfile(path)]
        elif os.path.exists(argument) or not any(mark in argument for mark in WILDCARDS):
            found = [argument]
        else:
            found = [path for path in sorted(glob.glob(argument, recursive=True)) if os.path.isfile(path)]
        unnamed: list[str] = []
        if found != [argument]:  # of a folder or pattern
            found = [path for path in found if base_name(path)[:1] not in "._" and not path.endswith(_SIGNATURE)]
            if file_format is None:
                unnamed = [path for path in found if format_of(path) is None]
                passed_over += unnamed
                found = [path for path in found if format_of(path) is not None]
        if not found:
            others = f"; it has {unnamed[0]}, whose name says no format (name one with --format)" if unnamed else ""
            raise InputError(f"{argument} has no file of rows{others}")
        files += found
    return files, passed_over


def _below(url: str, remote: RemotePath) -> list[str]:
    return remote.files() if remote.is_folder else [url]


def pair_outputs(files: Sequence[str], output: str, output_format: FileFormat | None) -> list[Shard]:
    """The shard of every file: of the same name, directly in the output folder, which is not made yet.

    With an output format that the name does not say, the shard's name ends in that format.

    Raises
    ------
    InputError
        If two files would have one shard, a file lies in the output folder, or something there is a link.
    """
    if scheme_of(output) is not None:
        raise InputError(f"{output}: outputs are written to a local folder; copy it when the run has ended")
    folder = os.path.realpath(output)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise InputError(f"several inputs need a folder for their outputs; {output} is a file")
    records = os.path.join(folder, RECORDS_FOLDER)
    owners: dict[str, str] = {}
    shards = []
    for path in files:
        name = _shard_name(base_name(path), output_format)
        if name in ("", ".", "..") or "/" in name or "\0" in name or name[0] in "._":
            raise InputError(f"{path}: {name!r} cannot be the name of a shard; rename it")
        if name in owners:
            raise InputError(f"{owners[name]} and {path} would both be the shard {name}; rename one")
        owners[name] = path
        if scheme_of(path) is None and _is_below(os.path.realpath(path), folder):
            raise InputError(f"the input {path} lies in the output folder {output}; name another folder")
        target = os.path.join(folder, name)
        record = os.path.join(records, "shards", f"{name}.json")
        beside = (target, f"{target}.partial", f"{target}.partial.state", f"{target}.partial.state.new")
        for written in (*beside, records, os.path.dirname(record), record, f"{record}.new"):
            if os.path.islink(written):
                raise InputError(f"{written} is a link, which could lead out of the output folder; remove it")
        shards.append(Shard(path, target, Path(record)))
    for shard in shards:  # such as a.jsonl and a.jsonl.partial
        for written in (str(partial_path(shard.output_path)), state_path(shard.output_path)):
            if os.path.basename(written) in owners:
                raise InputError(f"{owners[os.path.basename(written)]} has the name of another shard's unfinished rows")
    return shards


def _shard_name(name: str, output_format: FileFormat | None) -> str:
    if output_format is None or format_of(name) == output_format:
        return name
    packing = next((end for end in (".gz", ".zst") if name.lower().endswith(end)), "")
    stem = name.removesuffix(name[len(name) - len(packing) :]) if packing else name
    stem = os.path.splitext(stem)[0] if format_of(name) is not None else stem
    return f"{stem}.{output_format}" + ("" if output_format == "parquet" else packing)


def _is_below(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def save_record(path: Path, identity: str, source: list[int], rows: dict[str, int]) -> None:
    """Note that a shard is whole. It is noted before the shard gets its name: what has a name is finished.

    Parameters
    ----------
    path : Path
    identity : str
        What its numbers depend on.
    source : list of int
        The input's `remote.fingerprint`.
    rows : dict of str to int
        Number of rows by status.
    """
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump({"identity": identity, "input": source, "rows": rows}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    sync_folder(path.parent)


def load_record(path: Path) -> dict[str, Any]:
    """What `save_record` has noted.

    Raises
    ------
    InputError
        If it is gone or damaged.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        saved = None
    if not isinstance(saved, dict) or not all(isinstance(saved.get(key), kind) for key, kind in _RECORD_TYPES.items()):
        raise InputError(f"{path}, which says how its shard was made, is gone or damaged; move both away")
    return saved
