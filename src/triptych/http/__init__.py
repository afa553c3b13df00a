"""HTTP/1.1 relay layer: sans-IO parsing over httptools, asyncio server and client."""
