"""Diagnosing MMEngine configs: one function per finding, from a config, its model and its plan to what to know."""
