"""What the trainer and its hosts have in common: messages, settings, and shared memory."""
