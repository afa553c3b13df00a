"""Sound formats."""
