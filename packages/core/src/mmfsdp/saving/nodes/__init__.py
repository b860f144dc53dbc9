"""Checkpoints on the nodes' own disks, with a copy of each rank's file on another node."""
