"""The C++ extension: whether it is there, what its operations return (for tracing) and their gradients."""

from __future__ import annotations

import mmap
import runpy
from pathlib import Path

import torch
from torch import Tensor

from diffscore_fast.errors import ImplementationError
from diffscore_fast.ops.logit_gradients import logit_gradients
from diffscore_fast.ops.projection import Projection
from diffscore_fast.ops.registry import check_one_device


def _minor(version: str) -> str:
    """Major and minor part of a version: 2.13 for 2.13.0+cpu."""
    return ".".join(version.split(".")[:2])


try:
    from diffscore_fast import _C
except ImportError as error:
    _C = None
    _reason = f"the C++ extension diffscore_fast._C cannot be loaded ({error}); reinstall where a C++ compiler is found"
else:
    # An extension built from older sources loads as well, and may compute something else.
    hasher = Path(__file__).parents[2] / "csrc" / "fingerprint.py"  # in a checkout; not in an installed package
    sources = getattr(_C, "sources", str)()
    if hasher.exists() and runpy.run_path(str(hasher))["fingerprint"]() != sources:
        _C = None
        _reason = "the C++ extension was built from other sources than csrc/ holds; reinstall to build it anew"
    elif (built := _minor(getattr(_C, "torch_version", str)())) != _minor(torch.__version__):
        # torch's C++ interface changes between minor versions; an extension that still loads may read it wrongly.
        _C = None
        _reason = (
            f"the C++ extension was built against torch {built or 'of an unknown version'}, and this is torch "
            f"{torch.__version__}; reinstall from source to build it anew"
        )


def cpu_unavailable(device: torch.device) -> str | None:
    """Availability of the `cpu` implementations: None, or one sentence that says why not."""
    if device.type != "cpu":
        return f"it runs on the CPU, not on {device.type}"
    return None if _C is not None else _reason


def instruction_set() -> str | None:
    """Name of the inner loops that this processor runs ("avx2", "portable"); None without the extension."""
    return None if _C is None else _C.instruction_set()


def brgemm_unavailable(dtype: torch.dtype) -> str | None:
    """None where products of `dtype` can go through oneDNN's brgemm, else one sentence that says why not.

    The first call checks brgemm's products once.
    """
    return _reason if _C is None else _C.brgemm_unavailable(str(dtype).removeprefix("torch."))


def generated_code_unavailable() -> str | None:
    """None where the system lets this process write machine code and run it, else one sentence that says why not.

    oneDNN generates its kernels; under systemd's MemoryDenyWriteExecute or without SELinux's execmem it cannot.
    """
    if _C is not None:
        return _C.generated_code_unavailable()
    if not hasattr(mmap, "PROT_EXEC"):  # Windows, which has no such policy
        return None
    try:
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    except OSError as error:
        return f"the system grants no memory for generated code ({error.strerror})"
    return None


def avoid_generated_code() -> None:
    """Switches oneDNN off in torch where the system grants no memory for generated code.

    Every operation that torch gives to oneDNN (GELU in float32, products in bfloat16 on processors that have them)
    would end with "could not create a primitive". With oneDNN off, torch runs its own loops.
    """
    if torch.backends.mkldnn.enabled and generated_code_unavailable() is not None:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def _one_device(*inputs: object) -> None:
    """Refuses tensors on several devices: torch sends such a call here, and the result would be uninitialised."""
    tensors = {f"input {place}": item for place, item in enumerate(inputs) if isinstance(item, Tensor)}
    check_one_device("diffscore_fast", **tensors)


def _fake_logprob(hidden, weight, bias, targets, rows, *options) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    _one_device(hidden, weight, bias, targets, rows, *options)
    shape = targets.shape
    return hidden.new_empty(shape, dtype=torch.float32), hidden.new_empty(shape, dtype=torch.float32)


def _fake_statistics(hidden, weight, bias, targets, rows, *options):  # type: ignore[no-untyped-def]
    _one_device(hidden, weight, bias, targets, rows, *options)
    floats = [hidden.new_empty(targets.shape, dtype=torch.float32) for _ in range(3)]
    return (*floats, torch.empty_like(targets))


def _fake_attention(query, *others) -> Tensor:  # type: ignore[no-untyped-def]
    _one_device(query, *others)
    return query.new_empty(query.shape)


def _fake_linear(x, weight, bias, activation, *others):  # type: ignore[no-untyped-def]
    _one_device(x, weight, bias, *others)
    return x.new_empty((x.shape[0], weight.shape[0] // (2 if activation == "swiglu" else 1)))


def _fake_pack_weight(weight, gated) -> Tensor:  # type: ignore[no-untyped-def]
    _one_device(weight)
    groups = 2 if gated else 1
    return weight.new_empty((groups * -(-weight.shape[0] // groups // 48), -(-weight.shape[1] // 32) * 16, 48, 2))


def _fake_linear_packed(x, packed, width, bias, activation, *others):  # type: ignore[no-untyped-def]
    _one_device(x, packed, bias, *others)
    return x.new_empty((x.shape[0], width // (2 if activation == "swiglu" else 1)))


def _fake_log_mean_exp(values, segments):  # type: ignore[no-untyped-def]
    _one_device(values, segments)
    shape = (segments.shape[0] - 1,)
    return (*(values.new_empty(shape) for _ in range(4)), segments.new_empty(shape))


def _fake_bounds(log_p, folds, segments):  # type: ignore[no-untyped-def]
    _one_device(log_p, segments)
    return tuple(log_p.new_empty((segments.shape[0] - 1,)) for _ in range(3))


def _save_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    hidden, weight, bias, targets, rows, excluded_ids, vocab_size, logit_scale, soft_cap, weight_scale, _ = inputs
    ctx.save_for_backward(hidden, weight, bias, weight_scale, targets, rows, output[1])
    ctx.options = (excluded_ids, vocab_size, logit_scale, soft_cap)


def _backward(ctx, grad_log_prob, grad_log_sum_exp):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled():  # create_graph=True; the gradients would come without their graph
        raise ImplementationError("masked_logprob: 'cpu' has no second derivative; ask for 'reference'")
    hidden, weight, bias, weight_scale, targets, rows, log_sum_exp = ctx.saved_tensors
    grads = logit_gradients(
        hidden,
        Projection(weight, bias, weight_scale, *ctx.options),
        targets,
        rows,
        log_sum_exp=log_sum_exp,
        grad_log_prob=grad_log_prob,
        grad_log_sum_exp=grad_log_sum_exp,
        wanted=ctx.needs_input_grad[:3],
    )
    return (*grads, *[None] * 8)


if _C is not None:
    torch.library.register_fake("diffscore_fast::masked_logprob", _fake_logprob)
    torch.library.register_fake("diffscore_fast::masked_logprob_statistics", _fake_statistics)
    torch.library.register_fake("diffscore_fast::prefix_attention", _fake_attention)
    torch.library.register_fake("diffscore_fast::linear", _fake_linear)
    torch.library.register_fake("diffscore_fast::pack_weight", _fake_pack_weight)
    torch.library.register_fake("diffscore_fast::linear_packed", _fake_linear_packed)
    torch.library.register_fake("diffscore_fast::log_mean_exp", _fake_log_mean_exp)
    torch.library.register_fake("diffscore_fast::evidence_bounds", _fake_bounds)
    torch.library.register_autograd("diffscore_fast::masked_logprob", _backward, setup_context=_save_for_backward)
