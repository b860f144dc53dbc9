"""The time of a step: a roofline of the device, a model of the links, and FSDP's streams. Torch-free."""
