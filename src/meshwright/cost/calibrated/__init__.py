"""What was measured on a machine, in place of formulas."""
