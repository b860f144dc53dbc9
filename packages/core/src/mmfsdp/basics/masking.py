"""Decides what of a URL, and of text that may hold URLs and tokens, people may see: never what opens something.

Every error, log, report and file of mmfsdp that names a URL takes its text from here.
"""

from __future__ import annotations

import re

__all__ = ["hide_secrets", "mask_secrets", "mask_url"]

_MASK = "***"
_START = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}):/{1,2}")
_WITHIN_TEXT = re.compile(_START.pattern + r"[^\s'\"<>`]*")
_SIGNED = re.compile(r"\?[^?\s'\"<>)]*(?:=|%3D)[^\s'\"<>)]*")  # of an address without a scheme
_TOKEN = re.compile(
    r"(?i)(\bbearer\s+|authorization['\"]?\s*[:=]\s*['\"]?(?:(?:basic|bearer|token|digest)\s+)?"
    r"|(?:token|secret|passw(?:or)?d|signature|credential|api[-_]?key|access[-_]?key(?:[-_]?id)?)['\"]?\s*[:=]\s*['\"]?)"
    r"[^\s'\",;&)}\]]+"
)


def mask_url(text: str) -> str:
    """Return one URL, well-formed or not, without its login, query and fragment.

    Text before an ``@`` counts as a login wherever it may be one, since passwords may contain ``/``.
    """
    start = _START.match(text)
    if start is None:
        return text
    scheme, rest = start[1].lower(), text[start.end() :]
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    before, sign, _ = authority.rpartition("@")
    # A store may name a container so: abfs://container@account.
    secret = ":" in before or scheme in ("http", "https") if sign else ":" in authority.replace("::", "")
    if secret and "@" in rest:
        rest = rest.rpartition("@")[2]
    elif secret and not re.search(r"(^|[^:]):\d*$|^\[[^@]*\]", authority):
        rest = _MASK + rest[len(authority) :]  # a login that lost its host
    address = re.split("[?#]", rest, maxsplit=1)[0]
    return f"{text[: start.end()]}{address}" + ("?..." if len(address) < len(rest) else "")


def mask_secrets(text: str) -> str:
    """Return text, such as the message of a driver, without logins and queries of URLs, and without tokens."""
    text = _WITHIN_TEXT.sub(lambda match: mask_url(match[0]), text)
    return _TOKEN.sub(lambda match: match[1] + _MASK, _SIGNED.sub("?...", text))


def hide_secrets(error: BaseException) -> BaseException | None:
    """Return an error as the cause of another one; ``None`` if a traceback would show what `mask_secrets` masks."""
    link: BaseException | None = error
    while link is not None:
        if mask_secrets(str(link)) != str(link):
            return None
        link = link.__cause__ or link.__context__
    return error
