"""Saving, loading and resuming in the forms that MMEngine uses."""
