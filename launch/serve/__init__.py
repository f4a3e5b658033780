"""`python -m launch.serve`: a model behind the HTTP endpoints that editors, chats and evaluation harnesses call.

One thread runs the engine; the endpoints hand it texts and stream what it generates. The packages of the extra `serve`
are imported when the app starts, not before. `--cfg job` shows the keys.
"""

from .server import serve

__all__ = ["serve"]
