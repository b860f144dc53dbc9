"""Gathered copies of parameters: what users set on them, write to them, or use in their stead."""
