"""Bring a bundle from where it is kept to a folder: over HTTPS, or from an S3-compatible store."""
