"""DeepSpeed's checkpoints: ZeRO stages 0 to 3, pipelines and universal ones."""

__all__: list[str] = []
