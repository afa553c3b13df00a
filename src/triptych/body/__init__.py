"""JSON request bodies: offsets, media items, splices. Pure functions."""
