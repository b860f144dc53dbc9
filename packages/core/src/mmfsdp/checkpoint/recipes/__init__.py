"""Recipes that rewrite the names and shapes of weights, so that another library's model loads them."""
