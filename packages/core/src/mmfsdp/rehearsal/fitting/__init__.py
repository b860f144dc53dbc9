"""Searches for the settings with which a step of training fits into the memory of a device and is fastest."""
