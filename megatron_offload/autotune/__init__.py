"""The measured loop: look at a step, agree on a plan, measure what it costs, correct it, stop."""
