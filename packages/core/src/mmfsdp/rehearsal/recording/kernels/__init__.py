"""Memory that kernels hold and write on devices, and that their operators do not show."""
