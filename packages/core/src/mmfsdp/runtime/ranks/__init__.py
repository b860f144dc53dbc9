"""What ranks tell each other while they train: buffers, and which rank holds up the others."""
