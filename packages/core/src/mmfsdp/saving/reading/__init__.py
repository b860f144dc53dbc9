"""Reading a checkpoint on all ranks: what it holds, where its tensors lie, and loading them into a sharded model."""
