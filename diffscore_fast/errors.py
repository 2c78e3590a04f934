"""The errors of this package. Each message says what is wrong, where, and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

# Words by which a general error says that memory ran out: of torch's allocators on the CPU and on GPUs, of C++
# (`std::bad_alloc`), and of the system when a file is mapped.
OUT_OF_MEMORY = ("DefaultCPUAllocator", "bad_alloc", "out of memory", "annot allocate memory")


class DiffScoreError(Exception):
    """Base of all errors that this package raises on purpose."""


class UnsupportedPatternError(DiffScoreError, ValueError):
    """An attention pattern or block size that the model was not trained with."""


class CheckpointError(DiffScoreError, ValueError):
    """A model folder that is missing a file, holds unexpected tensors, or fails its own check."""


class InputError(DiffScoreError, ValueError):
    """Arguments or an input file that cannot be used; nothing has been scored."""


class ImplementationError(DiffScoreError, RuntimeError):
    """An implementation of an operation was asked for by name and cannot run."""


class DeviceMemoryError(DiffScoreError, MemoryError):
    """A device does not have the memory that one evaluation needs at least."""


class DependencyError(DiffScoreError, ImportError):
    """A feature needs an optional package or model that is not installed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: on a GPU, in torch's CPU allocator, in C++, numpy or Python."""
    import torch  # here, not above: `diffscore --help` does not need it

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError":
        return any(words in str(error) for words in OUT_OF_MEMORY)
    return False


@contextmanager
def memory_named(message: str) -> Iterator[None]:
    """Raise `DeviceMemoryError` with this message if memory runs out inside; one raised inside passes unchanged."""
    try:
        yield
    except DeviceMemoryError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(message) from error


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line; the name of its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
