"""What the trainer and its hosts both know: messages, settings, and the memory that they share."""
