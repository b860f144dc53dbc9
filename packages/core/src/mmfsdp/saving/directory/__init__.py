"""The directory of a run: what is in it, which checkpoints to keep, and which job holds it; on a disk or in a store."""
