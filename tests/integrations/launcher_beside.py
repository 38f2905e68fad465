"""Lies beside the script."""
