"""What happened, for people: tables, plots, traces and meters."""
