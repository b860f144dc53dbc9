"""Everything that touches the private parts of torch's FSDP1."""
