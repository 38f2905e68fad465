"""How a plan meets the steps of the run that it was made for: corrected, weighed, timed."""
