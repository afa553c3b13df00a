"""Connectors carry chunks between the processes of two stages. They import neither torch nor vLLM."""
