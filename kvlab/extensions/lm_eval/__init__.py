"""The source `recall`: documents of key and value pairs, and questions about them."""
