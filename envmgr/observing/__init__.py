"""Looking at trainers that run: dumps, live tables, metrics and timelines."""
