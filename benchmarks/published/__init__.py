"""Runs on GPUs that others published, rebuilt on shapes: the forecast beside the figure."""
