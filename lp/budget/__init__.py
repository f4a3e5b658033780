"""What a step costs, what it brings, and how many rows pay."""
