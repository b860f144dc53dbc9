"""The memory of a device: torch's caching allocator, the memory beside it, and a step's share of both."""
