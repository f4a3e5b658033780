"""Conversion between text and tokens: chats to token ids, and generated tokens to text as they come."""
