"""Text and tokens: chats as token ids, and generated tokens as text while they come."""
