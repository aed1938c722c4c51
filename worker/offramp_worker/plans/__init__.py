"""The path of a plan: a signed document is verified, its sessions are built, and it takes over between two batches."""
