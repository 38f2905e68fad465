"""Other libraries, and how this package takes its place in them."""
