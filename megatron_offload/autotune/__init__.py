"""Planning inside a run: agree, measure, correct, stop."""
