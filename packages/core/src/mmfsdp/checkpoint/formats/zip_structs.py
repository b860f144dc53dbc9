"""The structures of a zip archive, as PKWARE's APPNOTE.TXT describes them, sections 4.3 and 4.5.3 (zip64).

https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import struct

__all__ = ["CENTRAL", "END", "END64", "IN_ZIP64", "LOCAL", "LOCATOR", "UTF8"]

LOCAL = struct.Struct("<4s5H3L2H")
"""Local header of an entry, before its name."""
CENTRAL = struct.Struct("<4s6H3L5H2L")
"""Entry of the central directory, before its name."""
END = struct.Struct("<4s4H2LH")
"""End record, before its comment."""
END64 = struct.Struct("<4sQ2H2L4Q")
"""End record of zip64."""
LOCATOR = struct.Struct("<4sLQL")
"""Where the end record of zip64 is."""
IN_ZIP64 = 0xFFFFFFFF
"""In place of a number that does not fit into 32 bits, and is in a zip64 field."""
UTF8 = 0x800
"""Flag: the name is in UTF-8."""
