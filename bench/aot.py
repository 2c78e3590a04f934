"""`python -m bench.aot`: compiles every Triton kernel at its shipped configuration for each target, without a GPU.

For every kernel, shape and target it prints registers and spills per thread, shared memory per program, the upper bound
that these set on occupancy, the matrix instructions in the machine code, and the roofline time on an H200 (sm_90) and
an MI300X (gfx942): counted bytes and operations at the data-sheet rates. If a shipped configuration spills, the exit
status is 1. All cases take a quarter of an hour on two cores.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from diffscore_fast.ops.triton_kernels import kernels


@dataclass(frozen=True)
class Machine:
    """Limits of one multiprocessor, and rates of the whole device (data sheets)."""

    registers: int  # 32-bit, per multiprocessor
    shared: int  # bytes, per multiprocessor
    max_threads: int
    bandwidth: float = 0.0  # bytes per second; 0 where no time is printed
    rates: tuple[float, float] = (0.0, 0.0)  # operations per second: matrices in bfloat16 or float16; float32


TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), Machine(65536, 164 << 10, 2048)),
    "sm_90": (GPUTarget("cuda", 90, 32), Machine(65536, 228 << 10, 2048, 4.8e12, (990e12, 67e12))),  # H200
    "sm_100": (GPUTarget("cuda", 100, 32), Machine(65536, 228 << 10, 2048)),
    "gfx942": (  # MI300X
        GPUTarget("hip", "gfx942", 64),
        Machine(4 * 512 * 64, 64 << 10, 2048, 5.3e12, (1307e12, 163.4e12)),
    ),
}
MATRIX_INSTRUCTIONS = r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma_\w+|v_smfmac_\w+)"


@dataclass(frozen=True)
class Case:
    """One kernel at one shape: its source, and the bytes and operations counted from the shape."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    launch: tuple[int, int, bool]  # warps, stages, whether multiplications and additions may fuse
    moved: float  # bytes, each operand once
    operations: float


def cases() -> list[Case]:
    """Every kernel in every type and with every option, at the shapes of LLaDA-8B (D 4096, V 126464) and BD3-LM (D 768,
    V 50258). Head sizes 80 and 96 run the code of 128: the size is an argument; the next power of 2 is a constant."""
    found = logprob_cases("LLaDA-8B", 1024, 4096, 126464, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for options in ({}, {"capped": True}, {"eight_bit": True}):
            found += logprob_cases("BD3-LM", 1024, 768, 50258, dtype, **options)
        for heads, width in ((12, 32), (12, 64), (32, 128), (16, 256)):
            found += attention_cases(heads, width, dtype)
    return found + [case for folds in (2, 8, 32, 128) for case in segment_cases(1_000_000, max(8, folds), folds)]


def _letter(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def _case(
    name: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    launch: tuple[int, int, bool],
    moved: float,
    operations: float,
) -> Case:
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    missing = [key for key, kind in signature.items() if kind == "constexpr" and key not in constants]
    assert not missing, f"{name}: no type and no value for {missing}"
    return Case(name, kernel, signature, constants, launch, moved, operations)


def logprob_cases(
    model: str,
    rows: int,
    width: int,
    vocabulary: int,
    dtype: torch.dtype,
    *,
    capped: bool = False,
    eight_bit: bool = False,
) -> list[Case]:
    module, letter = kernels("masked_logprob"), _letter(dtype)
    config = module.config_for(dtype, eight_bit)
    tiles = {"BLOCK_N": config.BLOCK_N, "BLOCK_V": config.BLOCK_V, "BLOCK_D": config.BLOCK_D}
    flags = {"HAS_BIAS": True, "HAS_CAP": capped, "HAS_SCALE": eight_bit, "EXCLUDED": 1}
    size = dtype.itemsize
    stored = 1 if eight_bit else size
    operands, product = width * (size * rows + stored * vocabulary), 2.0 * rows * width * vocabulary
    types = {
        **dict.fromkeys(("hidden", "bias"), f"*{letter}"),
        "weight": "*i8" if eight_bit else f"*{letter}",
        **dict.fromkeys(("rows", "targets", "excluded", "rank"), "*i64"),
        **dict.fromkeys(("target_logit", "m_splits", "l_splits", "moment_splits", "log_sum_exp", "log_prob"), "*fp32"),
        "entropy": "*fp32",
        "above_splits": "*i32",
        "grad_log_prob": "*fp32",
        "gradient": f"*{letter}",
        "weight_scale": "*fp32",
        **dict.fromkeys(("count", "width", "vocabulary", "split_size", "splits", "first", "last"), "i32"),
        **dict.fromkeys(("hidden_stride", "weight_stride"), "i32"),
        **dict.fromkeys(("logit_scale", "soft_cap"), "fp32"),
    }
    option = " soft-cap" if capped else " int8 weight" if eight_bit else ""
    label = f"{model} D {width} V {vocabulary} {letter}{option}"
    launch = (config.num_warps, config.num_stages, config.enable_fp_fusion)
    partial = 2 * 4 * module.MAX_SPLITS * rows
    found = [
        _case(
            f"masked_logprob forward, {label}",
            module.masked_logprob_kernel,
            types,
            {**tiles, **flags, "STATISTICS": False},
            launch,
            operands + partial,
            product,
        ),
        _case(
            f"masked_logprob statistics, {label}",
            module.masked_logprob_kernel,
            types,
            {**tiles, **flags, "STATISTICS": True},
            launch,
            operands + 2 * partial,
            product,
        ),
        _case(
            f"masked_logprob target logits, {label}",
            module.masked_logprob_target_kernel,
            types,
            {**tiles, **flags},
            launch,
            (size + stored) * width * rows,
            2.0 * rows * width * config.BLOCK_V,
        ),
        _case(
            f"masked_logprob logit gradient, {label}",
            kernels("logit_gradients").masked_logprob_gradient_kernel,
            types,
            {**tiles, **flags},
            launch,
            operands + size * rows * vocabulary,
            product,
        ),
    ]
    if not option:
        merge = {"STATISTICS": True, "BLOCK_N": 128}
        found.append(
            _case(
                f"masked_logprob merge, {label}",
                module.masked_logprob_merge_kernel,
                types,
                merge,
                (4, 3, config.enable_fp_fusion),
                2 * partial,
                0.0,
            )
        )
    return found


def attention_cases(heads: int, head_dim: int, dtype: torch.dtype) -> list[Case]:
    """16 candidates x 20 draws x 73 tokens over a 450-token prefix."""
    module, letter = kernels("prefix_attention"), _letter(dtype)
    size = dtype.itemsize
    queries, prefix, window = 16 * 20 * 73, 450, 73
    types = {
        **dict.fromkeys(("query", "key", "value", "out"), f"*{letter}"),
        **dict.fromkeys(("rows", "query_begin", "query_end", "key_begin", "key_end", "limits"), "*i64"),
        "has_prefix": "*i64",
        **dict.fromkeys(("m_state", "l_state", "acc_state"), "*fp32"),
        **dict.fromkeys(
            (
                "heads",
                "group",
                "head_dim",
                "stride_qm",
                "stride_qh",
                "stride_kn",
                "stride_kh",
                "stride_vn",
                "stride_vh",
            ),
            "i32",
        ),
        "scale": "fp32",
    }
    numbers, state = queries * heads * head_dim, 4.0 * queries * heads * (head_dim + 2)
    first, second = module.prefix_config(dtype, head_dim), module.window_config(dtype, head_dim)
    found = []
    for name, config, keys, moved, limited in (
        ("prefix", first, prefix, size * numbers + state, False),
        ("window", second, window, 4 * size * numbers + state, False),
        ("window in blocks", second, window, 4 * size * numbers + state, True),
    ):
        constants = {
            "BLOCK_D": head_dim,
            "BLOCK_M": config.BLOCK_M,
            "BLOCK_N": config.BLOCK_N,
            "PREFIX": name == "prefix",
            "LIMITED": limited,
        }
        launch = (config.num_warps, config.num_stages, config.enable_fp_fusion)
        found.append(
            _case(
                f"prefix_attention {name}, {heads} heads of {head_dim} {letter}",
                module.prefix_attention_kernel,
                types,
                constants,
                launch,
                moved,
                4.0 * numbers * keys,
            )
        )
    return found


def segment_cases(count: int, draws: int, folds: int) -> list[Case]:
    """The float64 reductions; their time is the time to move their bytes."""
    means, bounds = kernels("log_mean_exp"), kernels("evidence_bounds")
    types = {
        **dict.fromkeys(("values", "log_mean", "error", "minimum", "maximum", "log_p"), "*fp64"),
        **dict.fromkeys(("lower", "plain", "upper"), "*fp64"),
        "segments": "*i64",
        "folds": "i32",
    }
    moved = 8.0 * count * (draws + 4)
    found = [
        _case(
            f"evidence_bounds {folds} folds fp64",
            bounds.evidence_bounds_kernel,
            types,
            bounds.tile_sizes(folds),
            (4, 3, True),
            moved,
            0.0,
        )
    ]
    if folds == 2:
        found.append(
            _case(
                "log_mean_exp fp64", means.log_mean_exp_kernel, types, {"BLOCK": means.BLOCK}, (1, 3, True), moved, 0.0
            )
        )
    return found


@dataclass(frozen=True)
class Compiled:
    registers: int
    spills: int  # bytes on NVIDIA, registers on AMD
    shared: int
    instructions: str


def compile_case(case: Case, target: GPUTarget) -> Compiled:
    """Compile one kernel for one target and read its resource usage."""
    constants = {
        (case.kernel.arg_names.index(name),): value
        for name, value in case.constants.items()
        if name in case.kernel.arg_names
    }
    # Pointers and the sizes that models keep at multiples of 16 are specialised as the launcher would.
    aligned = {"width", "head_dim", "hidden_stride", "weight_stride", "split_size"}
    aligned |= {f"stride_{tensor}{dim}" for tensor, dim in ("qm", "qh", "kn", "kh", "vn", "vh")}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(case.signature.items())
        if kind.startswith("*") or name in aligned
    }
    source = ASTSource(case.kernel, case.signature, constants, attributes)
    options = dict(zip(("num_warps", "num_stages", "enable_fp_fusion"), case.launch, strict=True))
    built = triton.compile(source, target=target, options=options)
    if target.backend == "hip":
        text = built.asm["amdgcn"]
        # Scalar registers spill into lanes of vector registers; only vector registers spill to memory.
        registers, spills = (
            int(re.search(rf"\.{key}:\s+(\d+)", text).group(1))  # type: ignore[union-attr]
            for key in ("vgpr_count", "vgpr_spill_count")
        )
    else:
        text = built.asm["ptx"]
        registers, spills = cubin_resources(built.asm["cubin"])
    kinds = sorted(set(re.findall(MATRIX_INSTRUCTIONS, text)))
    return Compiled(registers, spills, built.metadata.shared, " ".join(kinds) or "-")


def cubin_resources(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes (stack and local memory) per thread, as the toolkit's dump states them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2]) + int(found[3])


def occupancy(case: Case, built: Compiled, target: GPUTarget, machine: Machine) -> float:
    """Upper bound on resident threads from registers and shared memory, as a share of the multiprocessor's maximum."""
    threads = case.launch[0] * target.warp_size
    by_registers = machine.registers // max(1, built.registers * threads)
    by_shared = machine.shared // built.shared if built.shared else by_registers
    return min(1.0, min(by_registers, by_shared) * threads / machine.max_threads)


@click.command()
@click.argument("words", nargs=-1)
def main(words: tuple[str, ...]) -> None:
    """Compile the Triton kernels for each target: cases whose names contain all WORDS (LLaDA sm_90), or all cases."""
    count = report(words)
    if count:
        print(f"{count} kernels spill registers", file=sys.stderr)
    sys.exit(count > 0)


def report(words: tuple[str, ...]) -> int:
    """Print the table of the cases and targets that contain every word; returns the number of kernels with spills."""
    spilled = 0
    print(f"triton {triton.__version__}; compiled, not run: no GPU is used")
    for case in cases():
        for name, (target, machine) in TARGETS.items():
            if not all(word in f"{case.name} {name}" for word in words):
                continue
            built = compile_case(case, target)
            line = f"{case.name:58} {name:7} registers {built.registers:3} spills {built.spills:3} "
            line += (
                f"shared {built.shared / 1024:5.1f} KiB occupancy <= {occupancy(case, built, target, machine):4.0%} "
            )
            line += f"{built.instructions}"
            if machine.bandwidth:
                rate = machine.rates["fp32" in case.name]
                seconds = max(case.moved / machine.bandwidth, case.operations / rate)
                line += f"; {case.moved / 1e6:.0f} MB, {case.operations / 1e9:.1f} Gop, roofline {seconds * 1e6:.0f} us"
            print(line, flush=True)
            spilled += built.spills > 0
    return spilled


if __name__ == "__main__":
    main()
