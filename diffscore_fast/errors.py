"""Typed errors. Each says what was wrong, where, and what to do."""


class DiffScoreError(Exception):
    """Base of every error this package raises on purpose."""


class UnsupportedPatternError(DiffScoreError, ValueError):
    """An attention pattern or block size that the model was not trained with."""


class CheckpointError(DiffScoreError, ValueError):
    """A model folder that is missing a file, holds unexpected tensors, or fails its own check."""


class InputError(DiffScoreError, ValueError):
    """Arguments or an input file that cannot be used at all; nothing has been scored."""


class ImplementationError(DiffScoreError, RuntimeError):
    """An implementation of an operation that was asked for by name and cannot run."""


class DeviceMemoryError(DiffScoreError, MemoryError):
    """A device without room for what one evaluation needs at least."""


class DependencyError(DiffScoreError, ImportError):
    """An optional package or model that a feature needs and that is not installed."""
