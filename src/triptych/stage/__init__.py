"""What runs in the workers of a stage: its model sees the chunks of its requests, and says more than tokens."""
