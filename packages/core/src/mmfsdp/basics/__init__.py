"""What every room may use: text, dtypes, references by name, boxes of tensors, and imports on first use."""
