"""The dtypes of each shard unit, and what they round."""
