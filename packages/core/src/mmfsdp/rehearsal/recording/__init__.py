"""Records a step: operators on fake tensors, the allocations and messages that they make, and their costs."""

__all__: list[str] = []
