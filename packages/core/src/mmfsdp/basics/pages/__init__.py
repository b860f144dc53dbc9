"""Makes self-contained pages of HTML: the frame and the style that all share, and the markup in them."""
