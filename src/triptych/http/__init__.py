"""HTTP/1.1 relay layer: sans-IO parsing over httptools, asyncio server and client.

`head`, `chunked`, `parser` and `sse` do no I/O; `server` and `client` are asyncio protocols over them. Nothing here
knows of OpenAI's API, of legs or of plans.
"""
