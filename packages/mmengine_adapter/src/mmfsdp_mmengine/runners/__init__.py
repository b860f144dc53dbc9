"""MMEngine's runners, and the functions of MMEngine that are replaced."""
