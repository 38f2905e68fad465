"""Ways to mark groups without touching model code."""
