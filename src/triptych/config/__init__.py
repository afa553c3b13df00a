"""Settings files and their errors: YAML with line numbers, and messages that name field and source."""
