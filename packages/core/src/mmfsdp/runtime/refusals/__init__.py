"""Refuses uses that would silently train nothing, or train incorrectly."""
