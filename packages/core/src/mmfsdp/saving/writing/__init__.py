"""Writing a checkpoint from all ranks: as a whole, in parts, in the background, into a directory or a store."""
