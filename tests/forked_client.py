"""A command of forked_scripts.py, which copies it into the folder of the server's socket under the command's name."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
EXECUTABLE = os.readlink(os.path.join(FOLDER, "executable"))


def main() -> None:
    name = os.path.basename(__file__)
    words = sys.argv[1:] if name == "python" else [os.path.join(os.path.dirname(EXECUTABLE), name), *sys.argv[1:]]
    if not is_known(words[1:] if words[:1] == ["-u"] else words):
        os.execv(EXECUTABLE, [EXECUTABLE, *words])
    request = {"arguments": words, "directory": os.getcwd(), "environ": {**os.environ}}
    with socket.socket(socket.AF_UNIX) as server, open(os.memfd_create("request"), "w+") as file:
        try:
            server.connect(os.path.join(FOLDER, "socket"))
        except OSError:  # it has ended
            os.execv(EXECUTABLE, [EXECUTABLE, *words])
        json.dump(request, file)
        file.seek(0)
        socket.send_fds(server, [b"\1"], [file.fileno(), 0, 1, 2])
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda sent, _: server.sendall(bytes([sent])))
        answer = server.recv(8)
    if len(answer) != 8:
        sys.exit("The server of forked processes has ended.")
    code = int.from_bytes(answer, "little", signed=True)
    if code < 0:  # a signal has ended it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def is_known(words: list[str]) -> bool:
    """Whether the server can do what the real python would do with these words."""
    if os.environ.get("PYTHONWARNINGS", "ignore") not in ("", "ignore"):
        return False
    return len(words) > 1 if words[:1] in (["-c"], ["-m"]) else words != [] and os.path.isfile(words[0])


main()
