"""The schedulers of a stage: vLLM's own, with requests that wait for chunks. Importing this changes nothing in vLLM."""
