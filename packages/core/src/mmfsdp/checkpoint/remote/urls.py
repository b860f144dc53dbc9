"""Takes URLs apart, and puts names of files to them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote

from mmfsdp.basics.masking import mask_url
from mmfsdp.errors import ConfigError

__all__ = ["WEB", "Url", "check_writable"]

WEB = ("http", "https")
"""The schemes that are read without fsspec."""

_LAST_PORT = 65535
# pathlib makes one slash of the two.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://?([^/?#]*)([^?#]*)(?:\?([^#]*))?(?:#.*)?", re.DOTALL)
# fsspec joins the URLs of archives with two colons: zip://epoch_1.pth::s3://bucket/runs.zip
_HOST = re.compile(r"(?:\[[^\[\]]+\]|[^:\[\]]+)(?::[0-9]{0,5})?|[^:]+::.*")


@dataclass(frozen=True, slots=True)
class Url:
    """A URL in its parts. It is shown without login, password and query, which may hold a signature."""

    scheme: str
    """The scheme, such as ``'https'`` or ``'s3'``, in lower case."""
    login: str
    """``'user:password@'``, or empty."""
    host: str
    """The server, or the bucket."""
    path: str
    """The rest, as it was given, without a slash at the end."""
    query: str
    """The text after a question mark; every file below the URL keeps it."""

    @classmethod
    def of(cls, text: str) -> Url:
        """Take a URL apart.

        Raises:
            ConfigError: It is malformed, or it is not clear where its login ends.
        """
        match = _URL.fullmatch(text)
        if match is None or not match[2] or any(ord(letter) <= 32 for letter in match[2]):
            raise ConfigError(f"{mask_url(text)!r} is not a URL. Write one such as 'https://host/model.safetensors'.")
        scheme, (login, sign, host) = match[1].lower(), match[2].rpartition("@")
        if scheme not in WEB and ":" not in login:  # abfs://container@account
            login, sign, host = "", "", match[2]
        port, within = host.rpartition(":")[2], "::" in host
        unclear = not within and ":" in match[2] and "@" in match[3]  # a password with a slash, or a path
        if unclear or not _HOST.fullmatch(host) or (port.isdecimal() and int(port) > _LAST_PORT):
            raise ConfigError(
                f"{mask_url(text)!r} is not a URL: after the host there may be a port, and '@' may end a login. In a "
                "login, write '/' as %2F, '?' as %3F, '#' as %23 and '@' as %40; in a path, write '@' as %40."
            )
        return cls(scheme, login + sign, host, match[3].rstrip("/"), match[4] or "")

    def __str__(self) -> str:
        text = f"{self.scheme}://{self.host}{self.path}" + ("?..." if self.query else "")
        return "::".join(map(mask_url, text.split("::"))) if "::" in text else text

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    @property
    def full(self) -> str:
        """All of it, to open it with; never to be shown."""
        return f"{self.scheme}://{self.login}{self.host}{self.path}" + (f"?{self.query}" if self.query else "")

    @property
    def name(self) -> str:
        """The name of the file or directory."""
        last = self.path.rpartition("/")[2] or self.host
        return unquote(last) if self.scheme in WEB else last

    @property
    def parent(self) -> Url:
        """The directory that holds it; itself at the top."""
        return replace(self, path=self.path.rpartition("/")[0])

    def child(self, name: str) -> Url:
        """Return the URL of a file below this directory, by its path relative to it."""
        name = name.strip("/")
        return replace(self, path=f"{self.path}/{quote(name) if self.scheme in WEB else name}")


def check_writable(url: Url) -> None:
    """Raise if nothing can be written to a URL.

    Raises:
        ConfigError: It is not in S3.
    """
    if url.scheme not in ("s3", "s3a"):
        raise ConfigError(
            f"{str(url)!r} cannot be written: targets are paths on this machine, and s3://. Write to a path, and copy "
            "the result.",
            file=str(url),
        )
