"""`python -m bench.gpu`: times the Triton kernels and whole scores on a GPU.

masked_logprob and prefix_attention are timed in one run with torch and, where they are installed, Liger-Kernel,
cut-cross-entropy and flash-attn; scores are timed by the size of a pack. Rows go to bench/results/gpu.csv, with the
error of each call against float64 (of scores: against the CPU's).

Whether the numbers are right is tested, not timed: `python -m pytest -m gpu`.

The bench has not been run on a GPU. `TRITON_INTERPRET=1 python -m bench.gpu --device cpu --small` runs the same code in
Triton's interpreter, only to see that it runs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import click
import torch

from bench.gpu_cases import SMALL, Call, Case, Sizes, all_cases
from bench.records import RESULTS, append_rows

ROUNDS = 20


@click.command()
@click.option("--device", default="cuda", show_default=True, help="A CUDA or ROCm device, or cpu in the interpreter.")
@click.option("--small", is_flag=True, help="Tiny shapes and no record: only to see that it runs.")
def main(device: str, small: bool) -> None:
    """Time the Triton kernels and whole scores on a GPU. Correctness: python -m pytest -m gpu."""
    if device != "cpu" and not torch.cuda.is_available():
        print("bench.gpu needs a GPU that torch can use", file=sys.stderr)
        sys.exit(1)
    torch.manual_seed(0)
    place = torch.device(device)
    # Events are recorded on the current device.
    with tempfile.TemporaryDirectory() as scratch, torch.cuda.device_of(torch.empty(0, device=place)):
        for case in all_cases(place, SMALL if small else Sizes(), Path(scratch)):
            rows = measure(case, place)
            if rows and place.type == "cuda" and not small:
                append_rows(RESULTS / "gpu.csv", rows)


def measure(case: Case, device: torch.device) -> list[dict[str, str]]:
    """Time every call of a case; returns rows for the results. A call that cannot run is named and left out."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    dtype = str(case.dtype).removeprefix("torch.")
    rows = []
    for implementation, call in case.calls.items():
        try:
            result, seconds = timed(call, device)
        except Exception as reason:  # noqa: BLE001 - other projects' code, on hardware that it may not know
            print(f"{implementation} cannot run here: {type(reason).__name__}: {str(reason)[:200]}", flush=True)
            continue
        error = float((result[: len(case.exact)] - case.exact).abs().max())
        print(
            f"{case.operation} {implementation}, {case.shape} {dtype}: {seconds * 1e6:.0f} us, error {error:.1e}",
            flush=True,
        )
        rows.append(
            {
                "kernel": case.operation,
                "implementation": implementation,
                "shape": case.shape,
                "dtype": dtype,
                "median_s": f"{seconds:.7f}",
                "error": f"{error:.2e}",
                "device": name,
            }
        )
    return rows


def timed(call: Call, device: torch.device) -> tuple[torch.Tensor, float]:
    """Result of the first call, and the median time of later ones on a GPU; on a CPU the time of the first call."""
    begin = time.perf_counter()
    result = call()
    if device.type == "cpu":
        return result, time.perf_counter() - begin
    for _ in range(2):  # with the first call, three that compile and warm up
        call()
    seconds = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        seconds.append(start.elapsed_time(end) / 1e3)
    return result, statistics.median(seconds)


if __name__ == "__main__":
    main()
