"""Diagnoses MMEngine configs: each function reports one kind of finding about a config, its model and its plan."""
