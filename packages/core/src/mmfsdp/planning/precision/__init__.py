"""The dtypes of each shard unit, and the weights that they round."""
