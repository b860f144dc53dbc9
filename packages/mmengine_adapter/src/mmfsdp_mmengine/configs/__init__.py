"""Translates what MMEngine configs say into arguments of core."""
