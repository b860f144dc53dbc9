"""A small package that is laid out as OpenMMLab's are: registries of a scope of its own, models, hooks and configs."""
