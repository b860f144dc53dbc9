"""Inspecting checkpoints: verification, differences and summaries."""
