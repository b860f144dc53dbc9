"""What every room may use: dtypes, references by name, boxes of tensors, and importing on first use."""
