"""The memory of a device: torch's caching allocator, what lies beside it, and what a step takes of both."""
