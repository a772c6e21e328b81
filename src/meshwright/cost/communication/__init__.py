"""What ranks send each other, over which links, and what hides it."""
