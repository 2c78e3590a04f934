"""Files of measurements. Every record states date, threads, load of the machine, machine, and versions."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import torch

from diffscore_fast.backbones.loader import load_model
from diffscore_fast.version import __version__

RESULTS = Path(__file__).parent / "results"


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a CSV file; a new file gets a header.

    A column that the file does not have yet is added, and stays empty in the old rows. A column that the new rows do
    not have stays empty in them.
    """
    rows = [_with_circumstances(row) for row in rows]
    header, old = _read(path)
    columns = header if set(rows[0]) <= set(header) else [*rows[0], *(name for name in header if name not in rows[0])]
    path.parent.mkdir(parents=True, exist_ok=True)
    if columns != header:
        fresh = path.with_name(f"{path.name}.new")
        with fresh.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(old)
        fresh.replace(path)
    with path.open("a", newline="") as file:
        csv.DictWriter(file, columns).writerows(rows)


def append_record(path: Path, **found: Any) -> None:
    """Append a line to a JSON Lines file; NaN and infinities become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_finite(_with_circumstances(found)), allow_nan=False) + "\n")


def embedded_weights() -> str:
    """First 12 digits of the SHA-256 of the embedded model's weights."""
    return load_model("mini").weights_sha256[:12]


def machine() -> str:
    """Processor and instruction set, as written into the results."""
    names = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    family = re.search(r"cpu family\s*:\s*(\d+)", Path("/proc/cpuinfo").read_text())
    kind = f"{names[0]} family {family[1]}" if names and family else platform.processor()
    return f"{kind}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"


def _with_circumstances(found: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        **found,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "machine": machine(),
        "torch": torch.__version__,
        "version": __version__,
    }


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    if not path.exists():
        return [], []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        return list(reader.fieldnames or []), list(reader)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
