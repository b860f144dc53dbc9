"""Proofs of a plan: the same training in one process and on several ranks, compared."""
