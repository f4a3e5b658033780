"""Models: loading, and running one step of them."""
