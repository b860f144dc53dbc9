"""The directory of a run: its contents, the checkpoints to keep, and the job that holds it; on a disk or in a store."""
