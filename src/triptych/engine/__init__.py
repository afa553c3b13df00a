"""What runs inside vLLM processes (needs the engine extra)."""
