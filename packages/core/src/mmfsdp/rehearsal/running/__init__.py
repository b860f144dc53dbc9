"""Runs a step of training on fake tensors, as a training loop runs it."""
