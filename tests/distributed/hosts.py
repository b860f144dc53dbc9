"""Two hosts on one machine: network, mount, process and host name namespaces of their own, joined by a veth pair."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

__all__ = ["INTERFACE", "Host", "hosts_or_skip", "two_hosts"]

ROOT = Path(__file__).parents[2]
INTERFACE = "veth-mmfsdp"  # in a namespace of its own, so that no two runs meet
# The first process of a host: it lives as long as the test holds its standard input, and all others die with it.
_HOST = """
set -e
hostname "$1"
mount -t proc proc /proc
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf
mount -t tmpfs -o size=64m tmpfs "$2/disk"
ip link set lo up
echo ready
read -r _ || true
"""


class Host:
    """A host that is up.

    Args:
        name: Its host name.
        address: Its IP address.
        folder: With ``hosts`` and ``nsswitch.conf``, which are the host's own, and ``disk``, where a file system of its
            own is mounted.
    """

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address = name, address
        # In two steps: the process that makes a PID namespace is not in it.
        command = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        self._outer = subprocess.Popen(
            [*command, "sh", "-c", _HOST, "host", name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._outer.stdout is not None
        if self._outer.stdout.readline() != "ready\n":
            said = self._outer.communicate()[1]
            raise OSError(f"no host could be made: {said.strip()}")
        [self._init] = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()

    @property
    def pid(self) -> str:
        """The first process of the host, as this machine counts."""
        return self._init

    def connect(self, interface: str) -> None:
        """Make an interface, which this machine has, the host's."""
        _run("ip", "link", "set", interface, "netns", self._init)
        for arguments in (
            ("link", "set", interface, "name", INTERFACE),
            ("addr", "add", f"{self.address}/24", "dev", INTERFACE),
            ("link", "set", INTERFACE, "up"),
        ):
            _run("nsenter", "-t", self._init, "-n", "ip", *arguments)

    def unplug(self) -> None:
        """Take the host off the network without a word to the other one."""
        _run("nsenter", "-t", self._init, "-n", "ip", "link", "set", INTERFACE, "down")

    def plug_in(self) -> None:
        """Join the network again."""
        _run("nsenter", "-t", self._init, "-n", "ip", "link", "set", INTERFACE, "up")

    def start(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Run a command on the host, from the root of the repository."""
        own = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        paths = [path for path in sys.path if path]
        inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        return subprocess.Popen(
            ["nsenter", "-t", self._init, "-n", "-m", "-u", "-p", "--wd=" + str(ROOT), *command],
            env={**inherited, **own, "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)]), **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def enter(self) -> None:
        """Move this process, which must have one thread, to the host; it keeps its number."""
        for kind in ("net", "uts", "mnt"):
            with open(f"/proc/{self._init}/ns/{kind}") as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace of {self.name}")

    def stop(self) -> None:
        """End the host and all that runs on it, at once."""
        with suppress(ProcessLookupError):
            os.kill(int(self._init), signal.SIGKILL)
        self._outer.communicate()


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Bring two hosts up, ``node-a`` and ``node-b``, and take them down whatever happened.

    Args:
        folder: Empty, seen by both. Its ``disk`` is an empty file system of each host's own.

    Raises:
        OSError: Namespaces are not permitted here, or their tools are missing.
    """
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]:
        raise OSError(f"{missing[0]} is not installed")
    (folder / "disk").mkdir()
    addresses = {"node-a": "10.97.31.1", "node-b": "10.97.31.2"}
    # No host can reach a name server, and asking one would take seconds each time.
    (folder / "nsswitch.conf").write_text("hosts: files\n")
    (folder / "hosts").write_text(
        "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items())
    )
    ends = [f"mm{side}{os.getpid() % 10**6}{time.monotonic_ns() % 1000}" for side in "ab"]
    with ExitStack() as stack:
        hosts = []
        for name, address in addresses.items():
            hosts.append(Host(name, address, folder))
            stack.callback(hosts[-1].stop)
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        # Where an end went with its host, both are gone by then.
        stack.callback(subprocess.run, ["ip", "link", "del", ends[0]], capture_output=True, check=False)
        for host, end in zip(hosts, ends, strict=True):
            host.connect(end)
        yield hosts[0], hosts[1]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def hosts_or_skip(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Yield two hosts, as `two_hosts` does; skip the test where the machine allows none."""
    with ExitStack() as stack:
        try:
            pair = stack.enter_context(two_hosts(folder))
        except OSError as error:
            pytest.skip(f"Two hosts need network, mount and process namespaces: {error}")
        yield pair
