"""GGUF files, which llama.cpp loads: the weights, settings and tokenizer of Llama-like models."""

__all__: list[str] = []
