"""Refusals of what would silently train nothing, or train incorrectly."""
