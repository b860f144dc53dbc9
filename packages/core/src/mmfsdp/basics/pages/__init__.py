"""Pages of HTML that need nothing else: the frame and the style that all share, and the markup in them."""
