"""Comparing two records: the first tensor that differs, and what the difference suggests."""
