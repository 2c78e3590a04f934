"""Settings of the service: where it listens, who may ask, and its limits."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path

from diffscore_fast.errors import InputError

TOKEN_VARIABLE = "DIFFSCORE_TOKEN"
MIN_TOKEN_CHARACTERS = 16
MAX_TOKEN_BYTES = 4096


@dataclass(frozen=True)
class Limits:
    """What one request may ask, and how many requests may be at work.

    Parameters
    ----------
    body_bytes : int
        Of a request's body; counted while it arrives.
    rows : int
        Rows, candidates, documents or prompts of a request.
    tokens : int
        About how many tokens the model reads for a request: those of its texts (four characters each), times draws.
    requests : int
        Requests at work at once.
    seconds : float
        From a request's first byte to its answer.
    """

    body_bytes: int = 4 << 20
    rows: int = 4096
    tokens: int = 2_000_000
    requests: int = 64
    seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("body_bytes", "rows", "tokens", "requests", "seconds"):
            if not getattr(self, name) > 0:
                raise InputError(f"the limit on {name.replace('_', ' ')} must be above 0, not {getattr(self, name)}")


@dataclass(frozen=True)
class Settings:
    """How the service runs.

    Parameters
    ----------
    host : str
        Address to listen on. One that is not loopback needs a token.
    port : int
    token : str, optional
        What every request must carry, but for /health and /ready.
    allowed_hosts : tuple of str
        Names besides localhost and addresses that the Host header may give.
    batch_tokens : int
        About how many tokens the model reads for the rows that are scored together.
    max_wait : float
        Seconds that a request waits for others to be scored with.
    limits : Limits

    Raises
    ------
    InputError
        For an address that is open without a token, or values out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] = ()
    batch_tokens: int = 16_384
    max_wait: float = 0.005
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if self.token is None and not is_loopback(self.host):
            raise InputError(
                f"{self.host} can be reached from other machines: set a token, by --token-file or the environment "
                f"variable {TOKEN_VARIABLE}, or listen on 127.0.0.1"
            )
        if self.batch_tokens < 1:
            raise InputError(f"batch tokens must be at least 1, not {self.batch_tokens}")
        if not 0 <= self.max_wait <= 10:
            raise InputError(f"the maximum wait must lie between 0 and 10 seconds, not {self.max_wait}")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(path: str | None) -> str | None:
    """The token: the first line of a file, or else the environment variable; None if neither is given.

    Raises
    ------
    InputError
        If the file cannot be read, or the token is too short or cannot be sent in a header.
    """
    if path is None:
        where, token = f"the environment variable {TOKEN_VARIABLE}", os.environ.get(TOKEN_VARIABLE)
        if token is None:
            return None
    else:
        where = f"the token file {path}"
        try:
            with Path(path).open("rb") as file:
                head = file.read(MAX_TOKEN_BYTES)
        except OSError as error:
            raise InputError(f"cannot read {where}: {error.strerror}") from None
        token = head.decode("utf-8", "replace").partition("\n")[0].strip()
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise InputError(f"{where} must hold at least {MIN_TOKEN_CHARACTERS} printable ASCII characters without spaces")
    return token
