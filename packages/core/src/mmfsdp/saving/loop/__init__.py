"""The checkpoints of a training loop: when to save, the state of a run, and how a job ends."""
