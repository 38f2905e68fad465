"""What people look at: tables, plots, pages."""
