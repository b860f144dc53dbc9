"""What ranks do together, and what one of them says when the others do not come."""
