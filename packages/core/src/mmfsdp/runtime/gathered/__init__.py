"""Gathered copies of parameters: settings and writes that users make on them, and weights used in their stead."""
