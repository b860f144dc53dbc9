"""The memory of a rank, estimated from a plan alone."""
