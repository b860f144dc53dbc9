"""The model wrappers that MMEngine's runners call, and the steps they run."""
