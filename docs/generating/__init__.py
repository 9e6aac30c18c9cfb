"""The pages of docs/reference, each from what it describes."""
