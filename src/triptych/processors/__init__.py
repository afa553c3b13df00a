"""Stage input processors: what one stage produced, made into the next stage's input."""
