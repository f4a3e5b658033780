"""`lp batch in.jsonl out.jsonl`: answer a file of requests in OpenAI's batch format, by one engine or by many servers.

Without servers, requests go through the endpoints of `lp serve` in this process, so that they get the answers that `lp
serve` would give. The packages of the extra `serve` are imported only when the app starts.
"""

from .app import batch

__all__ = ["batch"]
