"""The command line, and what it measures and shows."""
