"""Side-by-side measurements. Each file says how to run it."""
