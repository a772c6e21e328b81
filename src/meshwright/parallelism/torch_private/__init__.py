"""Dependencies on torch's private parts or on its version, one function each."""
