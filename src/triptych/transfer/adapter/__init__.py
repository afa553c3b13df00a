"""The adapter between a stage's scheduler and its connector."""
