"""What engine and simulator share: plain numbers and decisions, without torch."""
