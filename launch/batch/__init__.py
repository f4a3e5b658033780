"""`lp batch in.jsonl out.jsonl`: answer a file of requests in OpenAI's batch format, by one engine or by many servers.

A request means what it means to `lp serve`: it goes through the same endpoints, in this process. The packages of the
extra `serve` are imported when the app starts, not before.
"""

from .app import batch

__all__ = ["batch"]
