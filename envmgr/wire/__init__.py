"""What the trainer and its hosts both know: messages, orders, and the memory that they share."""
