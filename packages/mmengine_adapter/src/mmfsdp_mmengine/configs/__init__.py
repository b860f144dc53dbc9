"""What MMEngine configs say: their arguments, functions and names, as core understands them."""
