"""The position in the data: which samples a run has seen, and where it begins after a resume."""
