"""What kernels hold and write on devices, where operators do not say it."""
