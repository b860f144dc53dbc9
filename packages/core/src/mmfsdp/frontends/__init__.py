"""Models and configs by the names that people type on a command line."""
