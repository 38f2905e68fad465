"""The search for rows: look at a step, agree on a plan, try it, measure what it takes, stop."""
