"""Programs of the ranks; they import nothing of Meshwright, since their environments have none of it."""
