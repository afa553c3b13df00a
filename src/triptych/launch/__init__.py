"""Starts and supervises the vLLM processes of a topology."""
