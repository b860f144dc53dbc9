"""Starting and leaving the process group, and taking turns on a machine."""
