"""Compares two records: finds the first tensor that differs, and says what the difference suggests."""
