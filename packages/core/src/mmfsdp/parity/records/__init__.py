"""Records what a training loop computes, step by step, as sketches."""
