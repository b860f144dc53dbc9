"""The checkpoints of a training loop: when to save, what a run is made of, and how a job ends."""
