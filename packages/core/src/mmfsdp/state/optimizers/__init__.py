"""The state of optimizers: its forms, loading it, and refusing one that does not fit."""
