"""What ranks do together, and what one of them says when the others do not come."""

from mmfsdp.basics.torch_version import require_torch

require_torch(__name__)
