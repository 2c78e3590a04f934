"""`diffscore` and `python` for blocks of documents, run by forks of one process that has loaded everything.

The package promises that forked children score as their parent would (in one thread). A shim on PATH sends its
arguments, folder and standard streams over a Unix socket; the server forks, and the child becomes the command.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_SHIM = """#!{python} -S
import array, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    message = "\\0".join([{kind!r}, os.getcwd(), *sys.argv[1:]]).encode()
    streams = array.array("i", [0, 1, 2])
    server.sendmsg([len(message).to_bytes(4, "big") + message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    code = int(server.recv(16) or b"70")
sys.exit(code)
"""


@contextmanager
def warm_commands() -> Iterator[Path]:
    """A folder for PATH that holds the shims, while the server runs."""
    # A short path: the address of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="warm") as name:
        folder, address = Path(name), f"{name}/socket"
        for kind in ("diffscore", "python"):
            shim = folder / kind
            shim.write_text(_SHIM.format(python=sys.executable, address=address, kind=kind))
            shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
        server = subprocess.Popen([sys.executable, __file__, address])
        try:
            while not Path(address).exists():
                assert server.poll() is None, "the server ended"
                time.sleep(0.05)
            yield folder
        finally:
            server.terminate()
            server.wait()


def _serve(address: str) -> None:
    import diffscore_fast.bounds
    import diffscore_fast.scoring  # noqa: F401
    from diffscore_fast.cli import bound, calibrate, compare, info, main, shards  # noqa: F401
    from diffscore_fast.engine import session

    # Reading the weights is most of what a command does over a few rows.
    session.load_model = functools.cache(session.load_model)
    for device in ("cpu", torch.device("cpu")):
        for dtype in (None, torch.float32):
            session.load_model("mini", device=device, dtype=dtype)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen(8)
        os.rename(f"{address}.new", address)
        while True:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _answer(client)
            client.close()


def _answer(client: socket.socket) -> None:
    """In a fork: run the command in a fork of its own, and send back its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, streams, _, _ = socket.recv_fds(client, 1 << 16, 3)
    size = int.from_bytes(data[:4], "big")
    while len(data) < size + 4:
        data += client.recv(1 << 16)
    kind, folder, *arguments = data[4:].decode().split("\0")
    child = os.fork()
    if child == 0:
        client.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(folder)
        _run(kind, arguments)
    for stream in streams:
        os.close(stream)
    _, state = os.waitpid(child, 0)
    client.sendall(str(os.waitstatus_to_exitcode(state) & 0xFF).encode())
    os._exit(0)


def _run(kind: str, arguments: list[str]) -> None:
    code = 0
    # The parent's objects remember the kind of file that theirs were.
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    try:
        sys.argv = [kind, *arguments]
        if kind == "diffscore":
            from diffscore_fast.cli.main import main

            main()
        else:
            assert arguments[0] == "-c", arguments
            exec(compile(arguments[1], "block", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
