"""Runs scripts and commands in processes that have imported torch already: importing it takes longer than most scripts.

`python()` is used as `sys.executable` is, and `environ_with_commands()` puts it and the commands of this environment on
``PATH``. Each is a small client (forked_client.py) that has a server fork a process for it, which takes over its
arguments, directory, environment, streams and namespaces; signals go there, and its exit code comes back. The server is
itself forked from the process that ranks are forked from, and so are the workers of pytest-xdist: tests/conftest.py.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import inspect
import json
import multiprocessing
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["environ_alone", "environ_with_commands", "python", "run_script"]

_CLIENT = Path(__file__).with_name("forked_client.py")
_COMMANDS = ("python", "torchrun", "mmfsdp-cli")
_folders: list[Path] = []  # one, once there is a server; processes that it forks have it, too


def run_script(
    script: Path, directory: Path, environ: Mapping[str, str], seconds: float, arguments: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a script as `python SCRIPT` would, and return how it ended and what it and its children printed.

    Args:
        script: The script.
        directory: The current directory.
        environ: The whole environment. Of ``PYTHONPATH``, what the process does not have is put first.
        seconds: How long it may take.
        arguments: What follows its name on the command line.

    Raises:
        subprocess.TimeoutExpired: It took longer.
    """
    command = [python(), str(script), *arguments]
    return subprocess.run(
        command, cwd=directory, env=environ, capture_output=True, text=True, check=False, timeout=seconds
    )


def environ_alone() -> dict[str, str]:
    """Return the environment that torchrun gives to the only rank of a world."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **alone, "MASTER_ADDR": "localhost", "MASTER_PORT": port}


def python() -> str:
    """Return the path of a `python` that need not import torch anew: for ``-m``, ``-c``, ``-u`` and scripts.

    With other options it is the real one, as it is where processes cannot be forked, and where coverage is measured:
    it would not know which process it is in.
    """
    forks = sys.platform == "linux" and "COVERAGE_PROCESS_CONFIG" not in os.environ
    return str(_folder() / "python") if forks else sys.executable


def environ_with_commands() -> dict[str, str]:
    """Return this environment with commands on ``PATH`` that need not import torch anew."""
    here = Path(sys.executable).parent
    folders = [str(Path(python()).parent), str(here), os.environ["PATH"]]
    return {**os.environ, "PATH": os.pathsep.join(folders)}


def _folder() -> Path:
    """Return the folder of the server's clients."""
    if not _folders:
        _folders.append(_start())
    return _folders[0]


def _start() -> Path:
    """Start the server, which ends with this process, and return the folder of its clients."""
    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    for name in _COMMANDS:
        (folder / name).write_text(f"#!{sys.executable} -IS\n{_CLIENT.read_text()}")
        (folder / name).chmod(0o755)
    (folder / "executable").symlink_to(sys.executable)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(str(folder / "socket"), theirs))
    server.start()
    theirs.close()
    ours.recv()  # it listens

    @atexit.register
    def end() -> None:
        ours.close()
        server.join(10)
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)

    return folder


def _serve(path: str, parent: Connection) -> None:
    """Fork a process for each client, until the parent is gone; end those whose client is gone."""
    _folders.append(Path(path).parent)
    gc.freeze()
    atexit.register(weakref.finalize._exitfunc)  # from Python 3.13 on, processes of multiprocessing forget it
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    parent.send(None)
    children: dict[int, int] = {}  # by the sockets of their clients
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(parent, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                client: Any = key.data or key.fileobj
                if selector.get_map().get(key.fd) is not key:
                    continue  # what came just before has ended it
                if client is parent:
                    for pid in children.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                if client is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                elif key.data:  # a child has ended
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(children.pop(client.fileno()), 0)[1])
                    if client in selector.get_map():
                        selector.unregister(client)
                        with contextlib.suppress(OSError):  # the client was killed just now
                            client.sendall(status.to_bytes(8, "little", signed=True))
                    client.close()
                else:  # a client says what to run, then hands signals on; or it was killed
                    number, files = _message(client)
                    if not number:
                        selector.unregister(client)
                    if key.fd in children:
                        os.kill(children[key.fd], number or signal.SIGKILL)
                    elif not files:
                        client.close()
                    else:
                        pid = os.fork()
                        if pid == 0:
                            _enter_namespaces(client)
                            for held in (selector, listener, parent, client):
                                held.close()
                            _become(*files)
                        children[key.fd] = pid
                        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, client)
                    for file in files:
                        os.close(file)


def _message(client: socket.socket) -> tuple[int, list[int]]:
    """Receive the number of a signal, or any number and the files of `_become`; zero from a client that is gone."""
    with contextlib.suppress(OSError):
        head, files, _, _ = socket.recv_fds(client, 1, 4)
        if head:
            return head[0], files
    return 0, []


def _enter_namespaces(client: socket.socket) -> None:
    """Be on the host that a client is on (tests/distributed/hosts.py); end if there is no client any more."""
    pid = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
    for kind in ("net", "uts", "mnt"):
        path = f"/proc/{pid}/ns/{kind}"
        try:
            if os.readlink(path) == os.readlink(f"/proc/self/ns/{kind}"):
                continue
            file = os.open(path, os.O_RDONLY)
        except OSError:
            os._exit(1)
        if ctypes.CDLL(None, use_errno=True).setns(file, 0):
            os._exit(1)
        os.close(file)


def _become(asked: int, *streams: int) -> None:
    """Be the process that was asked for, to its end: what to run is in one file, its streams are three others."""
    code = 1
    try:
        with open(asked, "rb") as file:
            request = json.load(file)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin = open(0)  # noqa: SIM115 - the server has closed it
        _set_up(request["environ"], request["directory"])
        arguments = request["arguments"]
        if arguments[0] == "-u":
            del arguments[0]
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(write_through=True)
        _execute(arguments)
        code = 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        sys.last_value = error  # as the interpreter does; handlers at exit look at it
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    if "RANK" in os.environ:  # gloo's threads may fail to end in order, which tests should see
        ctypes.pythonapi.Py_Exit(code)
    threading._shutdown()  # what the interpreter does at its end before it destroys what was imported
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _set_up(environ: dict[str, str], directory: str) -> None:
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    sys.executable = python()  # what it starts, as torchrun does its ranks, is forked, too
    sys.path[:0] = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ["", *sys.path]]
    # torchrun asks for its stack some ten times, and for each frame that has no file, Python looks through all modules,
    # of which there are thousands: half of what torchrun took.
    for file, module in (("<frozen runpy>", "runpy"), ("<string>", "__main__")):
        inspect.modulesbyfile[os.path.abspath(file)] = module  # type: ignore[attr-defined]
    sys.dont_write_bytecode = bool(environ.get("PYTHONDONTWRITEBYTECODE"))
    if environ.get("PYTHONWARNINGS"):
        warnings.simplefilter("ignore")  # clients ask for nothing else
    if environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    process._parent_process = None  # it is the main process of a program, which ends in another way than a child
    multiprocessing.set_start_method(None, force=True)  # the one that programs begin with
    if getattr(forkserver._forkserver, "_forkserver_authkey", b"") is not None:
        # Ranks that the process starts are forked from where it was itself. Python finds that server only in the
        # process that has started it.
        forkserver._forkserver.ensure_running = lambda: None


def _execute(arguments: list[str]) -> None:
    kind, *rest = arguments
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
