"""`lp batch in.jsonl out.jsonl`: answer a file of requests in OpenAI's batch format, by one engine or by many servers.

Without servers, requests go through the endpoints of `lp serve` in this process, so that answers are the same. The
packages of the extra `serve` are imported when the app starts, not before.
"""

from .app import batch

__all__ = ["batch"]
