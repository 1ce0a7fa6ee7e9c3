"""Side-by-side measurements and their report."""
