"""The demo: one command, real engines, proofs."""
