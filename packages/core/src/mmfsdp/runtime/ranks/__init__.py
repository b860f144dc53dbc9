"""Messages between ranks while they train: buffers, and which rank holds up the others."""
