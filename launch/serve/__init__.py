"""`python -m launch.serve`: a model behind the HTTP endpoints that editors, chats and evaluation harnesses call.

One thread runs the engine. The endpoints give it the sequences that requests ask for, and stream the text that it
generates. The packages of the extra `serve` are imported only when the app starts. `--cfg job` shows the config keys.
"""

from .server import serve

__all__ = ["serve"]
