"""MMEngine's optimizer wrappers on sharded parameters: mixed precision, clipping, accumulation."""
